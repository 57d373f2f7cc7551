"""The gradients of a rank's parameters in one flat buffer, summed in fp32 over micro-batches and data ranks."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel import ParallelContext, begin_gather_from_data_ranks, begin_sum_over_data_ranks
from ...partition import plan_buffer

_HOOKS = WeakIdKeyDictionary()  # of each parameter in a buffer; as its attribute it would be pickled with it


class Part(NamedTuple):
    """`size` elements of a parameter, from `start` on, which this rank updates; [row, column] on in `own`."""

    name: str
    param: nn.Parameter
    start: int
    row: int
    column: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.size == self.param.numel()


class GradientBuffer:
    """One flat buffer that accumulates the gradients during the backward pass, in fp32 at least.

    Over 512 micro-batches a sum in bf16 loses 12 % of its norm; here each micro-batch is added in fp32. The parameters
    move to a second buffer in the same order. With `context.zero1` every piece is cut into equal parts, one per data
    rank, which gets the sum of its own, updates it and sends the weights back (`begin_gather`).

    The backward pass runs from the last parameter to the first, and the buffer has that order (`plan_buffer`). In the
    last backward pass of a step, announced by `start_grad_sync`, a piece is sent as soon as all parameters from its
    first on have their gradient. All data ranks thus send the pieces in the same order, whatever the order in which
    their gradients are ready.

    Args:
        named: parameters in the model's order, of one dtype and device; a hook moves each gradient into the buffer, and
            takes the place of that of an earlier buffer.
        held: the one whose gradient becomes final only when `reduce` is called.

    Attributes:
        flat: the gradients.
        views: the gradient of each parameter by its name.
        weights: the parameters, in the same order.
        width: see `BufferPlan`.
        parts: what this rank updates, in the model's order.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], context: ParallelContext, held: nn.Parameter | None = None
    ) -> None:
        self.context, self._held = context, held
        parameters = list(named.values())
        sizes, row_lengths = [p.numel() for p in parameters], [p.shape[-1] for p in parameters if p.ndim > 1]
        plan = plan_buffer(sizes, row_lengths, context.dp_size, context.zero1, parameters[0].is_cuda)
        self.width, num, size = plan.width, plan.num_pieces, plan.piece_size
        self._piece_size = size
        self._grid = (num, plan.num_cuts, size // plan.num_cuts) if context.zero1 else (1, 1, num * size)
        self._cut = context.dp_rank if context.zero1 else 0
        accumulation_dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.flat = torch.zeros(num * size, dtype=accumulation_dtype, device=parameters[0].device)
        self.weights = torch.zeros_like(self.flat, dtype=parameters[0].dtype)
        self.views, self.parts = {}, []
        for index, ((name, param), start) in enumerate(zip(named.items(), plan.starts, strict=True)):
            place = slice(start, start + param.numel())
            view = self.views[name] = self.flat[place].view_as(param)
            param.data = self.weights[place].view_as(param).copy_(param.detach())
            if param in _HOOKS:
                _HOOKS[param].remove()
            trains = param.requires_grad
            param.requires_grad_(True)  # else torch refuses a hook, and a callback may still unfreeze it
            _HOOKS[param] = param.register_post_accumulate_grad_hook(partial(self._move_gradient, index, view))
            param.requires_grad_(trains)
            self.parts += self._parts_of(name, param, place)
        self._has_gradient = [False] * len(parameters)
        self._gathers = []  # of the weights, begun and not waited for, the first layers first
        self._pieces = self.flat.view(num, size)[: num if context.dp_size > 1 else 0]
        self._firsts = [sum(start >= (i + 1) * size for start in plan.starts) for i in range(num)]
        self._start_over()

    def _parts_of(self, name: str, param: nn.Parameter, place: slice) -> Iterator[Part]:
        """The parts of a parameter that has this place in the buffer."""
        _, num_cuts, length = self._grid
        for first in range(place.start // length * length, place.stop, length):
            row, cut = divmod(first // length, num_cuts)
            if cut == self._cut:
                low, high = max(place.start, first), min(place.stop, first + length)
                yield Part(name, param, low - place.start, row, low - first, high - low)

    def _start_over(self) -> None:
        self._in_last_backward = False
        self._is_final = [False] * len(self.views)
        self._final_from = len(self.views)  # all parameters from this one on are final
        self._num_sent, self._begun = 0, []  # pieces; sums not waited for

    def _move_gradient(self, index: int, view: Tensor, param: nn.Parameter) -> None:
        """Copy the gradient of the first micro-batch, so that the buffer need not be zeroed; add the others."""
        assert not self._is_final[index], "a gradient arrived after its piece may have been reduced"
        if self._has_gradient[index]:
            view.add_(param.grad)
        else:
            view.copy_(param.grad)
        self._has_gradient[index] = True
        param.grad = None
        if self._in_last_backward and param is not self._held:
            self._is_final[index] = True
            while self._final_from and self._is_final[self._final_from - 1]:
                self._final_from -= 1
            self._send_final_pieces()

    def _send_final_pieces(self) -> None:
        while self._num_sent < len(self._pieces) and self._firsts[self._num_sent] >= self._final_from:
            if self.context.zero1 and not self.flat.is_cuda:
                self._wait()  # gloo holds a copy of the piece until then
            self._begun.append(begin_sum_over_data_ranks(self._pieces[self._num_sent], self.context))
            self._num_sent += 1

    def _wait(self) -> None:
        while self._begun:
            self._begun.pop(0).wait()

    def own(self, flat: Tensor) -> Tensor:
        """What this rank updates of a tensor like `flat`, as a view: [1, n], with ZeRO-1 [pieces, n]."""
        return flat.view(self._grid)[:, self._cut]

    def part_views(self, own: Tensor) -> list[Tensor]:
        """Each of `parts` as a view of a tensor like `own`; whole parameters have their shape."""
        views = ((part, own[part.row, part.column : part.column + part.size]) for part in self.parts)
        return [view.view_as(part.param) if part.is_whole else view for part, view in views]

    def clear(self) -> None:
        """Zero the gradients."""
        self._has_gradient = [False] * len(self.views)

    def complete(self) -> None:
        """After the last micro-batch: set the gradients of unused and frozen parameters to zero."""
        for index, view in enumerate(self.views.values()):
            if not self._has_gradient[index]:
                view.zero_()
                self._has_gradient[index] = True

    def start_grad_sync(self) -> None:
        """Announce that the next backward pass is the last one before `reduce`, whose communication may start in it.

        Communicates:
            as `reduce`, during that backward pass, for pieces whose gradients are ready.
        """
        self._in_last_backward = True

    def reduce(self) -> None:
        """Add the gradients of the data ranks, or finish adding them; with ZeRO-1 a rank has the sums of its own part.

        Communicates:
            over the data group, an all-reduce of each piece, N numbers in total, N being the parameters of the rank;
            with ZeRO-1 a reduce-scatter.
        """
        self.complete()
        self._final_from = 0
        self._send_final_pieces()
        self._wait()
        self._start_over()

    def gather(self, flat: Tensor) -> None:
        """With ZeRO-1, fill a tensor like `flat` with the data ranks' own parts of it.

        Communicates:
            over the data group, an all-gather of each piece, N numbers in total.
        """
        for piece in flat.view(self._grid):
            begin_gather_from_data_ranks(piece.view(-1), self.context).wait()

    def begin_gather(self) -> None:
        """With ZeRO-1, begin to `gather` the weights, in the order in which the forward pass uses them.

        Whatever reads weights next must call `wait_for_weights`.

        Communicates:
            as `gather`.
        """
        pieces = self.weights.view(self._grid).unbind()
        self._gathers = [begin_gather_from_data_ranks(piece.view(-1), self.context) for piece in reversed(pieces)]

    def wait_for_weights(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Wait until these parameters have arrived, with all before them in the model's order; None: until all have.

        The host waits on a CPU, the current stream on a GPU.
        """
        if not self._gathers:
            return
        first = 0 if parameters is None else min(param.storage_offset() for param in parameters)
        while len(self._gathers) > first // self._piece_size:
            self._gathers.pop(0).wait()
