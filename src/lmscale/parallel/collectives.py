"""The conjugate operators f and g of the paper's Figure 3, and their two halves for sequence parallelism.

With sequence parallelism a tensor of [b, s, h] outside the parallel region is cut over the sequence: rank r holds
positions r s/p to (r + 1) s/p. f becomes an all-gather, g a reduce-scatter: together the bytes of one all-reduce.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .context import ParallelContext
from .float8 import GRADIENT, float8_linear, forward_product, input_gradient, to_float8, weight_gradient

# torch 2.13 has given them new names and warns of the old ones.
_all_gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return sum_over_tensor_ranks(grad_output, ctx.context), None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        return sum_over_tensor_ranks(x, context)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return _begin_all_gather(x, context)()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return sequence_shard(grad_output, ctx.context), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return _reduce_scatter(x, context)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return _begin_all_gather(grad_output, ctx.context)(), None


class _ColumnLinear(torch.autograd.Function):
    """f and the linear behind it, so that f's communication runs while the weight's gradient is computed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, context: ParallelContext, in_float8: bool) -> Tensor:
        ctx.context, ctx.in_float8 = context, in_float8
        ctx.save_for_backward(x, weight)
        whole = _begin_all_gather(x, context)() if context.sequence_parallel else x
        return forward_product(whole, weight, bias) if in_float8 else F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        context = ctx.context
        if context.sequence_parallel:  # the whole input is not kept: it comes again while its gradient is computed
            gather = _begin_all_gather(x, context)
        rows = grad_output.flatten(0, -2)
        if ctx.in_float8:
            rounded = to_float8(rows, GRADIENT)
            d_whole = input_gradient(rounded, weight).unflatten(0, grad_output.shape[:-1])
        else:
            d_whole = grad_output @ weight
        if context.sequence_parallel:
            d_x, summed = _begin_reduce_scatter(d_whole, context)
            x = gather()
        else:
            d_x, summed = _begin_all_reduce(d_whole, context)
        whole = x.flatten(0, -2)
        d_weight = weight_gradient(rounded, whole, weight.dtype) if ctx.in_float8 else rows.t() @ whole
        d_bias = rows.sum(dim=0)
        _wait(summed)
        return d_x, d_weight, d_bias, None, None


# Begun by the backend, to be waited for, or done by the channel, which leaves nothing to wait for.
def _begin_all_reduce(x: Tensor, context: ParallelContext) -> tuple[Tensor, dist.Work | None]:
    if context.tp_channel is not None:
        return context.tp_channel.all_reduce(x), None
    return x, dist.all_reduce(x, group=context.tp_group, async_op=True)


def _begin_all_gather(x: Tensor, context: ParallelContext) -> Callable[[], Tensor]:
    """[b, s/p, h] of every rank; what is returned waits for it and gives [b, s, h]."""
    if context.tp_channel is not None:
        whole = context.tp_channel.all_gather(x, dim=1)
        return lambda: whole
    parts = x.new_empty(context.tp_size, *x.shape)
    arrived = _all_gather_tensor(parts.flatten(0, 1), x.contiguous(), group=context.tp_group, async_op=True)

    def join() -> Tensor:
        arrived.wait()
        return parts.transpose(0, 1).flatten(1, 2)

    return join


def _begin_reduce_scatter(x: Tensor, context: ParallelContext) -> tuple[Tensor, dist.Work | None]:
    if context.tp_channel is not None:
        return context.tp_channel.reduce_scatter(x, dim=1), None
    b, s, h = x.shape
    parts = x.view(b, context.tp_size, s // context.tp_size, h).transpose(0, 1).flatten(0, 1)  # [p b, s/p, h]
    total = parts.new_empty(b, *parts.shape[1:])
    return total, _reduce_scatter_tensor(total, parts, group=context.tp_group, async_op=True)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _reduce_scatter(x: Tensor, context: ParallelContext) -> Tensor:
    """The sum of all ranks' [b, s, h], this rank's positions of it, [b, s/p, h]."""
    total, summed = _begin_reduce_scatter(x.contiguous(), context)
    _wait(summed)
    return total


def column_linear(x: Tensor, weight: Tensor, bias: Tensor, context: ParallelContext, in_float8: bool = False) -> Tensor:
    """f, or its all-gather, and the linear behind it.

    Shapes:
        x [..., in] equal on all tensor ranks, or with sequence parallelism [b, s/p, in], this rank's positions;
        weight [out/p, in]; bias [out/p]; returns [..., out/p] or [b, s, out/p].

    Args:
        in_float8: the three products; what is communicated keeps its type. See `float8_linear`.

    Communicates:
        over the tensor group. Forward nothing; backward one all-reduce of [..., in], during the weight's gradient. With
        sequence parallelism, forward one all-gather of [b, s, in]; backward the same again, during the input's
        gradient, and one reduce-scatter of [b, s, in] during the weight's.

    Source: section 3, Figure 3; Korthikanti et al. 2022, section 4.2.2, for the cut over the sequence.
    """
    if context.tp_size == 1:
        return float8_linear(x, weight, bias) if in_float8 else F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, context, in_float8)


def gather_sequence(x: Tensor, context: ParallelContext) -> Tensor:
    """All positions on every rank, for what follows the parallel region; without sequence parallelism `x` as it is.

    Shapes:
        x [b, s/p, h]; returns [b, s, h], whose gradient every rank must have whole.

    Communicates:
        forward one all-gather of [b, s, h] over the tensor group; backward nothing.
    """
    return _GatherSequence.apply(x, context) if context.sequence_parallel else x


def sequence_shard(x: Tensor, context: ParallelContext) -> Tensor:
    """This rank's positions of [b, s, ...], where the model is cut over the sequence; otherwise `x` as it is."""
    if not context.sequence_parallel:
        return x
    part = x.shape[1] // context.tp_size
    return x.narrow(1, context.tp_rank * part, part)


def first_position(x: Tensor, context: ParallelContext) -> int:
    """Where this rank's positions [b, s/p, ...] begin; 0 where it has all."""
    return context.tp_rank * x.shape[1] if context.sequence_parallel else 0


def copy_to_tensor_parallel_region(x: Tensor, context: ParallelContext) -> Tensor:
    """f: enter the parallel region, where every rank works on its own columns from the same input.

    Shapes:
        x: [..., h], equal on all tensor ranks; returned unchanged.

    Communicates:
        forward nothing; backward one all-reduce (sum) of the gradient [..., h] over the tensor group.

    Source: section 3, Figure 3.
    """
    return x if context.tp_size == 1 else _CopyToTensorParallelRegion.apply(x, context)


def reduce_from_tensor_parallel_region(x: Tensor, context: ParallelContext) -> Tensor:
    """g: leave the parallel region by adding the partial results of all ranks.

    Shapes:
        x: [..., h], this rank's partial sum; returns the total, equal on all tensor ranks; with sequence parallelism
        [b, s, h] to [b, s/p, h], this rank's positions of the total.

    Communicates:
        forward one all-reduce (sum) of [..., h] over the tensor group; backward nothing. With sequence parallelism
        forward one reduce-scatter, backward one all-gather.

    Source: section 3, Figure 3; Korthikanti et al. 2022, section 4.2.2.
    """
    if context.sequence_parallel:
        return _ScatterSequence.apply(x, context)
    return x if context.tp_size == 1 else _ReduceFromTensorParallelRegion.apply(x, context)


def sum_over_tensor_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """The sum of `x` over the tensor group, outside autograd; with one rank `x` itself."""
    return _all_reduce(x, context, "sum")


def max_over_tensor_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """The maximum of `x` over the tensor group, outside autograd; with one rank `x` itself."""
    return _all_reduce(x, context, "max")


def _all_reduce(x: Tensor, context: ParallelContext, operation: str) -> Tensor:
    if context.tp_size == 1:
        return x
    if context.tp_channel is not None:
        return context.tp_channel.all_reduce(x, operation)
    # `x` may be shared with another branch of the graph, and the reduction works in place.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=_OPERATIONS[operation], group=context.tp_group)
    return total


def sum_over_data_ranks(x: Tensor, context: ParallelContext) -> Tensor:
    """Add `x` in place over the data group, outside autograd; returns `x`."""
    if context.dp_size > 1:
        dist.all_reduce(x, group=context.dp_group)
    return x


def begin_sum_over_data_ranks(x: Tensor, context: ParallelContext, owner: int | None = None) -> dist.Work:
    """Begin to add `x` in place over the data group: into every rank, or into the data rank `owner` alone.

    Every data rank must begin the same sums in the same order, and wait for the work before it reads `x`, which is then
    of no use on ranks that are not the owner.
    """
    if owner is None:
        return dist.all_reduce(x, group=context.dp_group, async_op=True)
    return dist.reduce(x, group=context.dp_group, group_dst=owner, async_op=True)


def broadcast_from_data_ranks(parts: Sequence[Tensor], context: ParallelContext) -> None:
    """Part i of data rank i to all of the data group, in place."""
    begun = [  # all of them under way before the first is waited for
        dist.broadcast(part, group=context.dp_group, group_src=rank, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]
    for work in begun:
        work.wait()
