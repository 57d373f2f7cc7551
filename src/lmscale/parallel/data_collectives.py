"""Collectives of the data-parallel group, outside autograd."""

import torch.distributed as dist
from torch import Tensor

from .context import ParallelContext

# torch 2.13 deprecates the old names
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def sum_over_data_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """Add `x` in place over the data group; returns `x`."""
    if context.dp_size > 1:
        dist.all_reduce(x, group=context.dp_group)
    return x


def begin_sum_over_data_ranks(x: Tensor, context: ParallelContext) -> dist.Work:
    """Begin to add `x` in place over the data group; with `context.zero1` only this rank's cut of it.

    Every data rank must begin the same sums in the same order, and wait for the work before it reads `x`.

    Shapes:
        x [n], with ZeRO-1 n a multiple of the data ranks; of d of them, rank r has the cut [r n/d, (r + 1) n/d).
    """
    if context.zero1:
        own = x.view(context.dp_size, -1)[context.dp_rank]
        return _reduce_scatter(own, x, group=context.dp_group, async_op=True)
    return dist.all_reduce(x, group=context.dp_group, async_op=True)


def begin_gather_from_data_ranks(x: Tensor, context: ParallelContext) -> dist.Work:
    """Begin to fill `x` in place with each data rank's own cut, as in `begin_sum_over_data_ranks`."""
    return _all_gather(x, x.view(context.dp_size, -1)[context.dp_rank], group=context.dp_group, async_op=True)
