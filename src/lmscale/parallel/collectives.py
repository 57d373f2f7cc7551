"""The conjugate operators f and g of the paper's Figure 3, as autograd functions."""

import torch
import torch.distributed as dist
from torch import Tensor

from .context import ParallelContext


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        # The gradient may be shared with another branch of the graph, and the reduction works in place.
        grad = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def copy_to_tensor_parallel_region(x: Tensor, context: ParallelContext) -> Tensor:
    """f: enter the parallel region, where every rank works on its own columns from the same input.

    Shapes:
        x: [..., h], equal on all tensor ranks; returned unchanged.

    Communicates:
        forward nothing; backward one all-reduce (sum) of the gradient [..., h] over the tensor group.

    Source: section 3, Figure 3.
    """
    return x if context.tp_size == 1 else _CopyToTensorParallelRegion.apply(x, context.tp_group)


def reduce_from_tensor_parallel_region(x: Tensor, context: ParallelContext) -> Tensor:
    """g: leave the parallel region by adding the partial results of all ranks.

    Shapes:
        x: [..., h], this rank's partial sum; returns the total, equal on all tensor ranks.

    Communicates:
        forward one all-reduce (sum) of [..., h] over the tensor group; backward nothing.

    Source: section 3, Figure 3.
    """
    return x if context.tp_size == 1 else _ReduceFromTensorParallelRegion.apply(x, context.tp_group)


def sum_over_tensor_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """Add `x` in place over the tensor group, outside autograd; returns `x`."""
    if context.tp_size > 1:
        dist.all_reduce(x, group=context.tp_group)
    return x


def max_over_tensor_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """Take the maximum of `x` in place over the tensor group, outside autograd; returns `x`."""
    if context.tp_size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=context.tp_group)
    return x


def sum_over_data_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """Add `x` in place over the data group, outside autograd; returns `x`."""
    if context.dp_size > 1:
        dist.all_reduce(x, group=context.dp_group)
    return x
