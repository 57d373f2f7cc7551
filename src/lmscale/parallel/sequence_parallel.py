"""Sequence parallelism: outside the parallel region each rank holds only its own positions of the sequence.

A tensor [b, s, h] outside the region is cut over the sequence: rank r holds positions r s/p to (r + 1) s/p. f becomes
an all-gather and g a reduce-scatter, which together move the bytes of one all-reduce. The column-parallel linear layer
has its all-gather in `fast_linear.py`. Without `context.sequence_parallel`, `gather_sequence` and `sequence_shard`
return their input.

Source: Korthikanti et al. 2022, section 4.2.2.
"""

import torch
from torch import Tensor

from .context import ParallelContext


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return context.tp_communicator.all_gather(x, dim=1)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return sequence_shard(grad_output, ctx.context), None


class _ReduceScatterToSequenceShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return context.tp_communicator.reduce_scatter(x, dim=1)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.context.tp_communicator.all_gather(grad_output, dim=1), None


def gather_sequence(x: Tensor, context: ParallelContext) -> Tensor:
    """All positions on every rank, for what follows the parallel region.

    Shapes:
        x [b, s/p, h]; returns [b, s, h], whose gradient must be complete on every rank.

    Communicates:
        forward one all-gather of [b, s, h] over the tensor group; backward nothing.
    """
    return _GatherSequence.apply(x, context) if context.sequence_parallel else x


def reduce_scatter_to_sequence_shard(x: Tensor, context: ParallelContext) -> Tensor:
    """g of sequence parallelism: add the partial results of all ranks, and keep this rank's positions of the sum.

    Shapes:
        x [b, s, h], this rank's partial sum; returns [b, s/p, h], this rank's positions of the total.

    Communicates:
        over the tensor group, forward one reduce-scatter of [b, s, h], backward one all-gather.
    """
    return _ReduceScatterToSequenceShard.apply(x, context)


def sequence_shard(x: Tensor, context: ParallelContext) -> Tensor:
    """This rank's positions of [b, s, ...], [b, s/p, ...]; communicates nothing."""
    if not context.sequence_parallel:
        return x
    part = x.shape[1] // context.tp_size
    return x.narrow(1, context.tp_rank * part, part)


def first_position(x: Tensor, context: ParallelContext) -> int:
    """Position in the sequence of the first of this rank's positions [b, s/p, ...]."""
    return context.tp_rank * x.shape[1] if context.sequence_parallel else 0
