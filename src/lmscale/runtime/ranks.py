"""What all ranks of a job decide together: votes, errors and small objects, between the hosts."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..parallel.communicator import gather_objects

_NFS_DELAY_S = 60.0  # an NFS client keeps what it knows of a folder for up to `acdirmax`
T = TypeVar("T")


class AgreedError(ValueError):
    """What the user must correct, raised on all ranks together; `__cause__` is the error of the first that met it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # names in a forged file may contain line ends


@dataclass(frozen=True)
class Ranks:
    """All ranks of a job, and which one this process is; by default one alone.

    Each method is called by all of them.

    Args:
        rank: number of this one.
        size: how many there are.
        group: of gloo, of all; None: the default one.
        hosts: of gloo, if votes are counted per host: the ranks of this host, and the first rank of each.
        local_rank: number of this one among those of its host.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    hosts: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def any(self, *decisions: bool) -> list[bool]:
        """For each decision, whether any rank says yes; the same on all ranks.

        A rank that is gone ends the vote on its host, and the missing leader that of the others.

        Communicates:
            on one host, an all-reduce over the world. On several, an all-reduce over the ranks of each host, one over
            the first ranks of the hosts, and a broadcast on each host: gloo sends 2 (P - 1) messages one after the
            other for an all-reduce over P ranks.
        """
        if self.size == 1:
            return list(decisions)
        votes = torch.tensor([int(decision) for decision in decisions])
        if self.hosts is None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        else:
            host, leaders = self.hosts
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=host)
            if self.local_rank == 0:
                dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=leaders)
            dist.broadcast(votes, src=self.rank - self.local_rank, group=host)
        return [bool(vote) for vote in votes.tolist()]

    def agree(self, action: Callable[[], T], first_rank_only: bool = False) -> T | None:
        """Return this rank's `action()`; if it fails on any rank, raise the error of the lowest such rank on all ranks.

        Args:
            first_rank_only: the other ranks do nothing and return None.

        Raises:
            AgreedError: from a ValueError or an OSError of `action`.

        Communicates:
            one small object per rank.
        """
        result = error = None
        try:
            if self.is_first or not first_rank_only:
                result = action()
        except (OSError, ValueError) as problem:
            error = problem
        error = next((each for each in self.gather(error) if each is not None), None)
        if error is not None:
            raise AgreedError(str(error)) from error
        return result

    def gather(self, item: T) -> list[T]:
        """Every rank's small item by rank, on all ranks.

        Communicates:
            one object per rank.
        """
        return [item] if self.size == 1 else gather_objects(item, self.group)

    def broadcast(self, item: T) -> T:
        """Rank 0's small item, on all ranks.

        Communicates:
            one object from rank 0.
        """
        items = [item]
        if self.size > 1:
            dist.broadcast_object_list(items, src=0, group=self.group)
        return items[0]

    def check_shared(self, folder: Path) -> None:
        """Check that all ranks see what rank 0 writes into `folder`.

        Raises:
            AgreedError: some rank does not.

        Communicates:
            a few small objects per rank.
        """
        note = folder / f".{self.broadcast(uuid.uuid4().hex[:8])}.shared"

        def look() -> None:
            if not _appears(note):
                problem = f"rank {self.rank} does not see {folder}"
                raise ValueError(f"{problem}: it must be on a file system that all ranks share")

        self.agree(note.touch, first_rank_only=True)
        try:
            self.agree(look)
        finally:
            if self.is_first:
                note.unlink()


def make_ranks(local_size: int, timeout: timedelta, on_gpu: bool = False) -> Ranks:
    """The ranks of the default process group, on hosts of `local_size` each.

    Args:
        on_gpu: a group of gloo is made beside NCCL's, so that small decisions of the hosts need not wait for the GPUs.

    Communicates:
        the start of the groups, which every rank makes alike.
    """
    rank, size, options = dist.get_rank(), dist.get_world_size(), {"backend": "gloo", "timeout": timeout}
    group, hosts = dist.new_group(**options) if on_gpu else None, None
    if 1 < local_size < size:
        ranks_of_hosts = [list(range(first, first + local_size)) for first in range(0, size, local_size)]
        host, _ = dist.new_subgroups_by_enumeration(ranks_of_hosts, **options)
        hosts = host, dist.new_group([ranks[0] for ranks in ranks_of_hosts], **options)
    return Ranks(rank, size, group, hosts, rank % local_size)


def _appears(file: Path) -> bool:
    """Whether a file that another host has just written is there, or comes within `_NFS_DELAY_S`.

    Listing a folder makes an NFS client ask the server; otherwise it may trust its memory of what was missing.
    """
    deadline = time.monotonic() + _NFS_DELAY_S
    while True:
        with contextlib.suppress(OSError):
            os.listdir(file.parent.parent)
            if file.name in os.listdir(file.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
