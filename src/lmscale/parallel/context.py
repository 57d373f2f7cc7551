"""Where this process stands in the grid of data-parallel, pipeline and tensor-parallel ranks."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .communicator import Communicator, ProcessGroupCommunicator, SingleRankCommunicator
from .shared_memory import open_channel


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place in the (data, pipeline, tensor) grid and its groups.

    Tensor ranks are neighbours (Figure 8). With 8 ranks and tp_size 2 the tensor groups are [0, 1], [2, 3], [4, 5],
    [6, 7] and the data groups [0, 2, 4, 6], [1, 3, 5, 7]; rank 5 has tp_rank 1 and dp_rank 2. With pp_size 2 as well
    the pipelines are [0, 2], [1, 3], [4, 6], [5, 7] and the data groups [0, 4], [1, 5], [2, 6], [3, 7].

    The default is one process with no group. A context with tp_size > 1 and no group has the shapes of one rank of
    many and must not communicate; it serves counting and tests.

    Args:
        tp_communicator: performs the collectives of the tensor group (`choose_communicator`); by default through
            `tp_group`, or nothing for one rank.
        sequence_parallel: outside the parallel region the tokens are cut over the tensor ranks; needs tp_size > 1.
        zero1: each data rank holds the optimizer state of an equal part of the parameters; needs dp_size > 1.
        batch_halves: layers compute attention and MLP on one half of the samples after the other; needs tp_size > 1.
        pad_heads: a tp_size that does not divide the attention heads is allowed, see `ShardSpec.padding`.

    Source: section 3 and appendix B.1.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    tp_communicator: Communicator = field(default=None, compare=False)  # never None after `__post_init__`
    sequence_parallel: bool = False
    zero1: bool = False
    batch_halves: bool = False
    pad_heads: bool = False

    def __post_init__(self) -> None:
        if self.tp_communicator is None:
            alone = self.tp_size == 1
            default = SingleRankCommunicator() if alone else ProcessGroupCommunicator(self.tp_group, self.tp_size)
            object.__setattr__(self, "tp_communicator", default)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """This context: a copy of a model, as `AveragedModel` makes, computes on the same ranks."""
        return self

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embeddings."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has what follows the layers: the heads and the loss."""
        return self.pp_rank == self.pp_size - 1

    def batch_parts(self, num_samples: int) -> int:
        """In how many parts layers compute a batch; an odd one, which occurs only in validation, as a whole."""
        return 2 if self.batch_halves and num_samples % 2 == 0 else 1

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

    def local_ids(self, ids: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Indices of vocabulary ids in this rank's part, and which ids are not in it.

        Shapes:
            ids int64 [...]; returns int64 [...], 0 where the id is on another rank, and bool [...], True there.

        Args:
            num_local: length of this rank's part (v/p).
        """
        local = ids - self.tp_rank * num_local
        elsewhere = (local < 0) | (local >= num_local)
        return local.masked_fill(elsewhere, 0), elsewhere


def make_context(layout: Any, device_type: str, timeout: timedelta, shared_memory: bool = True) -> ParallelContext:
    """Make the groups of the grid over all ranks; returns this rank's place in it.

    Args:
        layout: a `Layout`: the size of each axis by its name, the outermost first, and its options.
        timeout: how long a collective may wait.
        shared_memory: see `choose_communicator`.

    Communicates:
        as torch does to make groups, and as `choose_communicator`.
    """
    axes = layout.axes
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():  # a mesh gives its groups torch's own time limit
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    if axes["pipeline"] > 1:
        start = torch.zeros(1, device=device_type)  # NCCL: all ranks must be in a group's first call
        dist.all_reduce(start, group=mesh.get_group("pipeline"))
    return ParallelContext(
        tp_rank=mesh.get_local_rank("tensor"),
        tp_size=axes["tensor"],
        dp_rank=mesh.get_local_rank("data"),
        dp_size=axes["data"],
        pp_rank=mesh.get_local_rank("pipeline"),
        pp_size=axes["pipeline"],
        tp_group=mesh.get_group("tensor"),
        dp_group=mesh.get_group("data"),
        pp_group=mesh.get_group("pipeline"),
        tp_communicator=choose_communicator(mesh.get_group("tensor"), timeout, shared_memory),
        sequence_parallel=layout.cuts_sequence,
        zero1=layout.cuts_optimizer,
        batch_halves=layout.cuts_batch,
        pad_heads=layout.pad_heads,
    )


def choose_communicator(group: dist.ProcessGroup, timeout: timedelta, shared_memory: bool = True) -> Communicator:
    """Choose the communication backend of a group; no other code does.

    Args:
        timeout: how long a rank may keep the others waiting in shared memory.
        shared_memory: ranks on one host without GPUs communicate through shared memory (`open_channel`).

    Communicates:
        as `open_channel`, to open the shared memory.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return SingleRankCommunicator()
    channel = open_channel(group, timeout) if shared_memory else None
    return channel or ProcessGroupCommunicator(group, size)
