"""The communication backends of tensor ranks, behind one small interface that f, g and the loss use.

How to add a backend:
1. Subclass `Communicator` and write its three collectives. Override the `begin_` forms too, if the backend can work in
   the background.
2. Return it from `choose_communicator` (`context.py`), or pass it as `ParallelContext(tp_communicator=...)`.

`tests/parallel/test_communicator.py` does so with a communicator that counts bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames both and warns about the old names.
_all_gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Communicator(ABC):
    """Collectives of the p ranks of one group, outside autograd. All ranks issue the same ones in the same order.

    A collective leaves its input unchanged and may return it. A `begin_` form starts the collective and returns a
    function that waits for it and returns the result; until then the input belongs to the communicator, which may
    overwrite it. Unless overridden, a `begin_` form completes the collective at once.

    Shapes:
        x [..., n, ...], the same shape and dtype on all ranks, n at dimension `dim`.

    Attributes:
        backend: name of the transport, for the log.
    """

    backend: str

    @abstractmethod
    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        """The sum, or with `max` the maximum, of `x` over the ranks, [..., n, ...]."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The concatenation of every rank's `x` along `dim`, [..., p n, ...]."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of `x` over the ranks, [..., n/p, ...]."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin `all_reduce` (sum)."""
        result = self.all_reduce(x)
        return lambda: result

    def begin_all_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Begin `all_gather`."""
        result = self.all_gather(x, dim)
        return lambda: result

    def begin_reduce_scatter(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Begin `reduce_scatter`."""
        result = self.reduce_scatter(x, dim)
        return lambda: result


class SingleRankCommunicator(Communicator):
    """The group of one rank: every collective returns its input."""

    backend = "none"

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x


class ProcessGroupCommunicator(Communicator):
    """A group of `torch.distributed`: NCCL between GPUs, gloo between CPUs.

    Args:
        size: number of ranks of the group (p).
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.group, self.size = group, size
        self.backend = "none" if group is None else dist.get_backend(group)

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], group=self.group)
        return total

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        _all_gather_tensor(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0)  # the part that each rank receives
        total = x.new_empty(parts.shape[1:])
        _reduce_scatter_tensor(total, parts.flatten(0, 1), group=self.group)
        return total

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        work = dist.all_reduce(x, group=self.group, async_op=True)
        return lambda: _wait_for(work, x)

    def begin_all_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        parts = x.new_empty(self.size, *x.shape)
        work = _all_gather_tensor(parts.flatten(0, 1), x.contiguous(), group=self.group, async_op=True)
        return lambda: _wait_for(work, parts).movedim(0, dim).flatten(dim, dim + 1)

    def begin_reduce_scatter(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0)
        total = x.new_empty(parts.shape[1:])
        work = _reduce_scatter_tensor(total, parts.flatten(0, 1), group=self.group, async_op=True)
        return lambda: _wait_for(work, total)


def _wait_for(work: dist.Work, result: Tensor) -> Tensor:
    work.wait()
    return result
