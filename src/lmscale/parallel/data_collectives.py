"""Collectives of the data-parallel group, outside autograd."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from .context import ParallelContext


def sum_over_data_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """Add `x` in place over the data group; returns `x`."""
    if context.dp_size > 1:
        dist.all_reduce(x, group=context.dp_group)
    return x


def begin_sum_over_data_ranks(x: Tensor, context: ParallelContext, owner: int | None = None) -> dist.Work:
    """Begin to add `x` in place over the data group, into every rank or only into the data rank `owner`.

    Every data rank must begin the same sums in the same order, and wait for the work before it reads `x`. On ranks
    other than the owner, `x` then holds nothing useful.
    """
    if owner is None:
        return dist.all_reduce(x, group=context.dp_group, async_op=True)
    return dist.reduce(x, group=context.dp_group, group_dst=owner, async_op=True)


def broadcast_from_data_ranks(parts: Sequence[Tensor], context: ParallelContext) -> None:
    """Broadcast part i from data rank i over the data group, in place."""
    begun = [  # all of them are under way before the first wait
        dist.broadcast(part, group=context.dp_group, group_src=rank, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]
    for work in begun:
        work.wait()
