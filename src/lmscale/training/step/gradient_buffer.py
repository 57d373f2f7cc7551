"""The gradients of a rank's parameters in one flat buffer, summed in fp32 over micro-batches and data ranks."""

import math
from bisect import bisect_left, bisect_right
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...parallel import ParallelContext, begin_sum_over_data_ranks, broadcast_from_data_ranks
from ...partition import assign_owners, buffer_pieces

ALIGNED = 8  # elements: 16 bytes of a half type
ROW_ELEMENTS = 1024  # at most, see `width`


class _Piece(NamedTuple):
    """A part of the buffer that is reduced at once, to `owner` (None: to all), when all parameters from `first` on are
    final."""

    values: Tensor
    owner: int | None
    first: int


def needs_buffer(dtype: torch.dtype, context: ParallelContext, rounds: bool = False) -> bool:
    """Whether the gradients are summed in a `GradientBuffer`; otherwise autograd adds them to those of the parameters.

    Half types would lose small gradients in sums of their own type; several data ranks reduce the buffer in pieces;
    moments that are rounded (bf16) are updated by `OnePass`.
    """
    return dtype in (torch.float16, torch.bfloat16) or context.dp_size > 1 or context.zero1 or rounds


class GradientBuffer:
    """One flat buffer that accumulates the gradients during the backward pass, in fp32 at least.

    Over 512 micro-batches a sum in bf16 loses 12 % of its norm; here each micro-batch is added in fp32. The parameters
    move to a second buffer in the same order. With `context.zero1` this is ordered by the data ranks that own the
    parameters; each part is then summed into its owner alone, and the owners broadcast the updated parameters.

    The backward pass runs from the last parameter to the first, and the buffer (each owner's part of it) has that
    order, but for tensors that are not whole rows of `width`, which come last in it. Those of odd sizes are at the very
    end: kernels read 16 bytes at once from addresses that are multiples of 16. In the last backward pass of a step,
    announced by `start_grad_sync`, a piece is sent as soon as all parameters from its first on have their gradient. All
    data ranks thus send the pieces in the same order, whatever the order in which their gradients are ready.

    Args:
        parameters: in the model's order, of one dtype and device; a hook moves each gradient into the buffer.
        held: the one whose gradient becomes final only when `reduce` is called.

    Attributes:
        flat: the gradients.
        views: the gradient of each parameter, as a view.
        owners: the data rank that owns each parameter with `zero1`; otherwise None: every rank updates all.
        own: the part of the buffer that this rank updates.
        weights: the parameters, in the same order.
        width: elements of a row, a power of two that divides the rows of all matrices.
    """

    def __init__(
        self, parameters: list[nn.Parameter], context: ParallelContext, held: nn.Parameter | None = None
    ) -> None:
        self.context, self._held = context, held
        sizes = [param.numel() for param in parameters]
        self.owners = assign_owners(sizes, context.dp_size) if context.zero1 else None
        owners = self.owners or [0] * len(sizes)
        self.width = math.gcd(ROW_ELEMENTS, *(param.shape[-1] for param in parameters if param.ndim > 1))

        order = reversed(range(len(sizes)))
        order = sorted(order, key=lambda i: (owners[i], sizes[i] % self.width != 0, sizes[i] % ALIGNED != 0))
        starts, self._parts, end = [0] * len(sizes), [], 0
        for owner in range(context.dp_size if self.owners else 1):
            first = end = end + -end % ALIGNED
            for index in (index for index in order if owners[index] == owner):
                starts[index], end = end, end + sizes[index]
            self._parts.append(slice(first, end))
        accumulation_dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.flat = torch.zeros(end, dtype=accumulation_dtype, device=parameters[0].device)
        self.views = [
            self.flat[i : i + param.numel()].view_as(param) for i, param in zip(starts, parameters, strict=True)
        ]
        self._has_gradient = [False] * len(parameters)
        for index, param in enumerate(parameters):
            param.register_post_accumulate_grad_hook(partial(self._move_gradient, index))
        self.own = self._parts[context.dp_rank if self.owners else 0]
        self.weights = torch.zeros_like(self.flat, dtype=parameters[0].dtype)
        for i, param in zip(starts, parameters, strict=True):
            param.data = self.weights[i : i + param.numel()].view_as(param).copy_(param.detach())
        ends = [starts[index] + sizes[index] for index in order]
        self._pieces = self._cut(order, ends) if context.dp_size > 1 else []
        self._start_over()

    def _cut(self, order: list[int], ends: list[int]) -> list[_Piece]:
        """The pieces in the order in which they are sent."""
        pieces = []
        for owner, part in enumerate(self.flat[part] for part in self._parts):
            for values in part.split(buffer_pieces(part.numel())):
                start = values.storage_offset()
                in_it = order[bisect_right(ends, start) : bisect_left(ends, start + values.numel()) + 1]
                pieces.append(_Piece(values, owner if self.owners else None, first=min(in_it)))
        return sorted(pieces, key=lambda piece: -piece.first)

    def _start_over(self) -> None:
        self._in_last_backward = False
        self._is_final = [False] * len(self.views)
        self._final_from = len(self.views)  # all parameters from this one on are final
        self._begun: list[dist.Work] = []  # of the first pieces

    @torch.no_grad()
    def _move_gradient(self, index: int, param: nn.Parameter) -> None:
        """Copy the gradient of the first micro-batch, so that the buffer need not be zeroed; add the others."""
        assert not self._is_final[index], "a gradient arrived after its piece may have been reduced"
        if self._has_gradient[index]:
            self.views[index].add_(param.grad)
        else:
            self.views[index].copy_(param.grad)
        self._has_gradient[index] = True
        param.grad = None
        if self._in_last_backward and param is not self._held:
            self._is_final[index] = True
            while self._final_from and self._is_final[self._final_from - 1]:
                self._final_from -= 1
            self._send_final_pieces()

    def _send_final_pieces(self) -> None:
        for piece in self._pieces[len(self._begun) :]:
            if piece.first < self._final_from:
                break
            self._begun.append(begin_sum_over_data_ranks(piece.values, self.context, piece.owner))

    def own_views(self, flat: Tensor) -> list[Tensor]:
        """The parameters that this rank updates, in the model's order, as views of a tensor like `own`."""
        starts = ((view, view.storage_offset() - self.own.start) for view in self.views)
        return [flat[i : i + view.numel()].view_as(view) for view, i in starts if 0 <= i < len(flat)]

    def clear(self) -> None:
        """Zero the gradients."""
        self._has_gradient = [False] * len(self.views)

    def complete(self) -> None:
        """After the last micro-batch: set the gradients of unused parameters to zero."""
        for index, has_one in enumerate(self._has_gradient):
            if not has_one:
                self.views[index].zero_()
                self._has_gradient[index] = True

    def start_grad_sync(self) -> None:
        """Announce that the next backward pass is the last one before `reduce`, whose communication may start in it.

        Communicates:
            as `reduce`, during that backward pass, for pieces whose gradients are ready.
        """
        self._in_last_backward = True

    def reduce(self) -> None:
        """Add the gradients of the data ranks, or finish adding them; with `zero1` only the owner has the sum.

        Communicates:
            over the data group, all-reduces of N numbers in total, N being the parameters of the rank; with `zero1`
            instead reduces to the owners, N numbers in total; both in pieces (`buffer_pieces`).
        """
        self.complete()
        self._final_from = 0
        self._send_final_pieces()
        for work in self._begun:
            work.wait()
        self._start_over()

    def share_weights(self) -> None:
        """With `zero1`, broadcast the updated parameters from their owners.

        Communicates:
            over the data group, a broadcast from each data rank of the parameters it owns, N numbers in total.
        """
        if self.owners:
            broadcast_from_data_ranks([self.weights[part] for part in self._parts], self.context)
