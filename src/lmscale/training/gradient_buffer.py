"""Gradients of a rank's parameters, side by side, summed in fp32 over micro-batches and data ranks."""

from functools import partial

import torch
from torch import Tensor, nn

from ..parallel import ParallelContext, broadcast_from_data_ranks, reduce_to_data_ranks
from ..parallel.collectives import sum_over_data_ranks
from ..perf.buckets import GRADIENT_ALL_REDUCE_ELEMENTS
from ..perf.ownership import assign_owners, part_sizes


class GradientBuffer:
    """One flat buffer that takes up the gradients as the backward pass makes them, in fp32 at least.

    Over 512 micro-batches a sum in bf16 loses 12 % of its norm; here each micro-batch is added in fp32. With
    `context.zero1` the parameters stand in the order of the data ranks that own them: each part is then summed into its
    owner alone, and the parameters, which stand in a second buffer in the same order, are sent out by their owners.

    Args:
        parameters: of one dtype and device; each gradient is moved into the buffer by a hook.

    Attributes:
        flat: the gradients.
        views: of the gradients, one a parameter.
        owners: the data rank of each parameter with `zero1`, otherwise None: every rank updates all.
    """

    def __init__(self, parameters: list[nn.Parameter], context: ParallelContext) -> None:
        self.context = context
        sizes = [param.numel() for param in parameters]
        self.owners = assign_owners(sizes, context.dp_size) if context.zero1 else None
        order = sorted(range(len(sizes)), key=lambda index: self.owners[index] if self.owners else 0)
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        self.flat = torch.zeros(sum(sizes), dtype=wide, device=parameters[0].device)
        self.views: list[Tensor] = _in_order(self.flat, parameters, order)
        self._has_gradient = [False] * len(parameters)
        for index, param in enumerate(parameters):
            param.register_post_accumulate_grad_hook(partial(self._move_gradient, index))
        self.weights: Tensor | None = None
        self.part_sizes: list[int] = []
        if self.owners:
            self.part_sizes = part_sizes(sizes, context.dp_size)
            self.weights = torch.empty_like(self.flat, dtype=parameters[0].dtype)
            for param, view in zip(parameters, _in_order(self.weights, parameters, order), strict=True):
                param.data = view.copy_(param.detach())

    @torch.no_grad()
    def _move_gradient(self, index: int, param: nn.Parameter) -> None:
        """Of the first micro-batch a copy, so that nothing need be set to zero before."""
        if self._has_gradient[index]:
            self.views[index].add_(param.grad)
        else:
            self.views[index].copy_(param.grad)
        self._has_gradient[index] = True
        param.grad = None

    def clear(self) -> None:
        """Forget the gradients."""
        self._has_gradient = [False] * len(self.views)

    def complete(self) -> None:
        """After the last micro-batch: parameters that took no part have a gradient of zero."""
        for index, has_one in enumerate(self._has_gradient):
            if not has_one:
                self.views[index].zero_()
                self._has_gradient[index] = True

    def reduce(self) -> None:
        """Add the gradients of the data ranks; with `zero1` only the owner's are then right.

        Communicates:
            over the data group all-reduces of together N numbers, N the parameters of the rank; with `zero1` a reduce
            to each data rank of the parameters it owns, together N numbers.
        """
        self.complete()
        if self.owners:
            reduce_to_data_ranks(self.flat.split(self.part_sizes), self.context)
        elif self.context.dp_size > 1:
            for part in self.flat.split(GRADIENT_ALL_REDUCE_ELEMENTS):
                sum_over_data_ranks(part, self.context)

    def share_weights(self) -> None:
        """With `zero1`, after an update: every parameter from its owner; otherwise nothing.

        Communicates:
            over the data group a broadcast from each data rank of the parameters it owns, together N.
        """
        if self.weights is not None:
            broadcast_from_data_ranks(self.weights.split(self.part_sizes), self.context)


def _in_order(flat: Tensor, parameters: list[nn.Parameter], order: list[int]) -> list[Tensor]:
    """Views of `flat`, one a parameter, laid out in `order`."""
    parts = flat.split([parameters[index].numel() for index in order])
    views = {index: part.view_as(parameters[index]) for index, part in zip(order, parts, strict=True)}
    return [views[index] for index in range(len(parameters))]
