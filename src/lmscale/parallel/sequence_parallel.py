"""Sequence parallelism: outside the parallel region each rank holds only its own tokens of the micro-batch.

The b s tokens of a tensor [b, s, h], sample by sample, are cut into p equal parts: rank r holds tokens r b s/p to
(r + 1) b s/p, in the shape [b, s/p, h]. Its rows are parts of sequences, one after the other: part r b + i of the b p
parts of length s/p in row i. What the ranks hold, one after the other, is the whole tensor, so no collective copies
it. With `batch_halves` each half of the samples is cut so, and row i of a rank belongs to the same half as sample i.

f becomes an all-gather and g a reduce-scatter, which together move the bytes of one all-reduce. The column-parallel
linear layer has its all-gather in `fast_linear.py`. Without `context.sequence_parallel` rank order is that
of the samples, each rank's tokens are all tokens, and nothing is communicated.

Source: Korthikanti et al. 2022, section 4.2.2, which cuts the sequence; here all work between the collectives is per
token, so that any cut of the tokens serves.
"""

import torch
from torch import Tensor

from .context import ParallelContext
from .rng import keys_from_row


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        by_rank = context.tp_communicator.all_gather(x).unflatten(0, (context.tp_size, context.batch_parts(len(x)), -1))
        return by_rank.transpose(0, 1).reshape(len(x), -1, x.shape[-1])

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return sequence_shard(grad_output, ctx.context), None


class _ReduceScatterToSequenceShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return context.tp_communicator.reduce_scatter(x.flatten(0, 1)).view(len(x), -1, x.shape[-1])

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(grad_output, ctx.context), None


def gather_tokens(x: Tensor, context: ParallelContext) -> Tensor:
    """All tokens of what a layer computes at once, a micro-batch or a half of one, outside autograd.

    Shapes:
        x [b, s/p, h]; returns [b, s, h].

    Communicates:
        one all-gather of [b, s, h] over the tensor group.
    """
    return context.tp_communicator.all_gather(x).view(len(x), -1, x.shape[-1]) if context.sequence_parallel else x


def gather_sequence(x: Tensor, context: ParallelContext) -> Tensor:
    """All tokens of a micro-batch on every rank, for what follows the layers.

    Shapes:
        x [b, s/p, h]; returns [b, s, h], whose gradient must be complete on every rank.

    Communicates:
        forward one all-gather of [b, s, h] over the tensor group; backward nothing.
    """
    return _GatherSequence.apply(x, context) if context.sequence_parallel else x


def reduce_scatter_to_sequence_shard(x: Tensor, context: ParallelContext) -> Tensor:
    """g of sequence parallelism: add the partial results of all ranks, and keep this rank's tokens of the sum.

    Shapes:
        x [b, s, h], this rank's partial sum; returns [b, s/p, h], this rank's tokens of the total.

    Communicates:
        over the tensor group, forward one reduce-scatter of [b, s, h], backward one all-gather.
    """
    return _ReduceScatterToSequenceShard.apply(x, context)


def in_rank_order(x: Tensor, context: ParallelContext) -> Tensor:
    """Every rank's tokens of [b, s, ...], one after the other, in the same shape."""
    return _cut(x, context).transpose(0, 1).reshape(x.shape) if context.sequence_parallel else x


def sequence_shard(x: Tensor, context: ParallelContext) -> Tensor:
    """This rank's tokens of [b, s, ...], [b, s/p, ...]; communicates nothing."""
    return _cut(x, context)[:, context.tp_rank].flatten(0, 1) if context.sequence_parallel else x


def _cut(x: Tensor, context: ParallelContext) -> Tensor:
    """[b, s, ...] as [parts, p, b/parts, s/p, ...]: of every part of the batch the tokens of every rank."""
    p, parts = context.tp_size, context.batch_parts(len(x))
    return x.reshape(parts, p, len(x) // parts, context.shard(x.shape[1]), *x.shape[2:])


def positions_of_own_tokens(table: Tensor, x: Tensor, context: ParallelContext) -> Tensor:
    """Rows of a table of all positions, for this rank's tokens.

    Shapes:
        table [s or more, h]; x [b, s/p, h], of which only the shape counts; returns [b, s/p, h].
    """
    s = x.shape[1] * (context.tp_size if context.sequence_parallel else 1)
    return sequence_shard(table[:s].expand(len(x), -1, -1), context)


def keys_of_own_tokens(keys: Tensor, seq_length: int, in_region: slice, context: ParallelContext) -> Tensor:
    """Dropout keys of the rows of this rank's tokens: masks equal those of the whole tensor on one rank.

    Shapes:
        keys int32 [num_sites, b], of the samples (`site_keys`); returns int32 [num_sites, b].

    Args:
        seq_length: tokens s of a whole sequence.
        in_region: sites in the parallel region, where every rank has all tokens; they keep the keys of the samples.
    """
    if not context.sequence_parallel:
        return keys
    starts = torch.arange(0, seq_length, context.shard(seq_length), dtype=torch.int32, device=keys.device)
    of_parts = keys_from_row(keys.unsqueeze(-1), starts)  # [num_sites, b, p]
    own = sequence_shard(of_parts.permute(1, 2, 0), context).squeeze(1).t().contiguous()
    own[in_region] = keys[in_region]
    return own
