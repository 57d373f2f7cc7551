"""The communication backends of tensor ranks, behind one small interface that f, g and the loss use.

How to add a backend:
1. Subclass `Communicator` and write its three collectives. Override the `begin_` forms too, if the backend can work in
   the background.
2. Return it from `choose_communicator` (`context.py`), or pass it as `ParallelContext(tp_communicator=...)`.

`tests/parallel/test_communicator.py` does so with a communicator that counts bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional
T = TypeVar("T")


class Communicator(ABC):
    """Collectives of the p ranks of one group, outside autograd. All ranks issue the same ones in the same order.

    A collective leaves its input unchanged and may return it. A `begin_` form starts the collective and returns a
    function that waits for it and returns the result; until then the input belongs to the communicator, which may
    overwrite it. Unless overridden, a `begin_` form completes the collective at once.

    Shapes:
        x [n, ...], the same shape and dtype on all ranks.

    Attributes:
        backend: name of the transport, for the log.
    """

    backend: str

    @abstractmethod
    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        """The sum, or with `max` the maximum, of `x` over the ranks, [n, ...]."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The concatenation of every rank's `x`, [p n, ...]."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum of `x` over the ranks, [n/p, ...]."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin `all_reduce` (sum)."""
        result = self.all_reduce(x)
        return lambda: result

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin `all_gather`."""
        result = self.all_gather(x)
        return lambda: result

    def begin_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin `reduce_scatter`."""
        result = self.reduce_scatter(x)
        return lambda: result


class SingleRankCommunicator(Communicator):
    """The group of one rank: every collective returns its input."""

    backend = "none"

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x


class ProcessGroupCommunicator(Communicator):
    """A group of `torch.distributed`: NCCL between GPUs, gloo between CPUs.

    It issues torch's functional collectives, which torch.compile traces: a compiled layer stays one graph per
    direction. A `begin_` form returns after the launch; its function makes the stream (on a CPU the host) wait.

    Args:
        size: number of ranks of the group (p).
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.size = size
        self.backend, self._name = ("none", "") if group is None else (dist.get_backend(group), group.group_name)

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, self._name))

    def all_gather(self, x: Tensor) -> Tensor:
        return self.begin_all_gather(x)()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.begin_reduce_scatter(x)()

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        total = _ops.all_reduce(x.contiguous(), "sum", self._name)
        return lambda: _ops.wait_tensor(total)

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        parts = _ops.all_gather_into_tensor(x.contiguous(), self.size, self._name)
        return lambda: _ops.wait_tensor(parts)

    def begin_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        total = _ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self._name)
        return lambda: _ops.wait_tensor(total)


def gather_objects(item: T, group: dist.ProcessGroup | None) -> list[T]:
    """The small item of each rank of a group, on all its ranks.

    Communicates:
        one object per rank.
    """
    items = [item] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items
