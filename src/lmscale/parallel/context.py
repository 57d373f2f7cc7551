"""Where this process stands in the grid of tensor-parallel and data-parallel ranks."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from .shared_memory import SharedMemoryChannel


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place in the (data, tensor) grid and the two groups it talks to.

    Tensor ranks are neighbours (Figure 8). With 8 ranks and tp_size 2 the tensor groups are [0, 1], [2, 3], [4, 5],
    [6, 7] and the data groups [0, 2, 4, 6], [1, 3, 5, 7]; rank 5 has tp_rank 1 and dp_rank 2.

    The default is one process with no group. A context with tp_size > 1 and no group has the shapes of one rank of
    many and must not communicate; it serves counting and tests.

    Args:
        tp_channel: what adds up over the tensor group instead of its backend, where there is one (`open_channel`).
        sequence_parallel: outside the parallel region the tensors are cut over the sequence; needs tp_size > 1.
        zero1: a data rank has the optimizer's state of the parameters it owns alone; needs dp_size > 1.

    Source: section 3 and appendix B.1.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_group: ProcessGroup | None = None
    dp_group: ProcessGroup | None = None
    tp_channel: SharedMemoryChannel | None = None
    sequence_parallel: bool = False
    zero1: bool = False

    def shard(self, size: int) -> int:
        """Length of this rank's part of a dimension of `size`.

        Raises:
            ValueError: `tp_size` does not divide `size`.
        """
        if size % self.tp_size:
            raise ValueError(f"a sharded dimension must be a multiple of `tp_size` ({self.tp_size}), but is {size}")
        return size // self.tp_size

    def start(self, size: int) -> int:
        """First index of this rank's part of a dimension of `size`."""
        return self.tp_rank * self.shard(size)
