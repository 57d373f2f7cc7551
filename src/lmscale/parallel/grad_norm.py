"""Gradients of a model whose parameters are partly sharded and partly replicated: their last sum, and their norm."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .collectives import sum_over_data_ranks, sum_over_tensor_ranks
from .context import ParallelContext


@dataclass(frozen=True)
class GradientNorm:
    """Norm of the whole model's gradient, equal on all tensor ranks, and whether every element of it was finite."""

    norm: float
    finite: bool


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter], context: ParallelContext) -> None:
    """Add the gradients of parameters that each tensor rank has used on its own positions (`ShardSpec.sees_shard`).

    Args:
        parameters: with `.shard` and, where they took part, `.grad`, which is changed in place.

    Communicates:
        one all-reduce of all such gradients over the tensor group; nothing where there are none.

    Source: Korthikanti et al. 2022, section 4.2.2.
    """
    partial = [param.grad for param in parameters if param.shard.sees_shard and param.grad is not None]
    if not partial:
        return
    total = sum_over_tensor_ranks(torch.cat([grad.flatten() for grad in partial]), context)
    parts = total.split([grad.numel() for grad in partial])
    torch._foreach_copy_(partial, [part.view_as(grad) for part, grad in zip(parts, partial, strict=True)])


def global_gradient_norm(
    parameters: Iterable[nn.Parameter], context: ParallelContext, device: torch.device
) -> GradientNorm:
    """L2 norm of the gradient of the logical model: shards added over the tensor ranks, replicated ones counted once.

    All ranks get the same answer, also about finiteness: an inf on one rank is seen by all.

    Args:
        parameters: with `.shard` and, where they took part, `.grad`; with `context.zero1` those this data rank owns, if
            any.
        device: of the gradients.

    Communicates:
        one all-reduce of three numbers over the tensor group; with `context.zero1` another over the data group.

    Source: section 4.2 (clipping of the global norm); counting as in Megatron-LM's `mpu/grads.py`, but every rank adds
    its own copy of the replicated part instead of rank 0 alone, so that the sum cannot differ from rank to rank.
    """
    sums = _sums_of_squares(parameters, context, device)
    bad = (~sums.isfinite()).any().double()
    sharded_sum, replicated_sum, num_bad = _add_over_ranks(torch.cat([sums, bad[None]]), context).tolist()
    return GradientNorm(norm=(sharded_sum + replicated_sum) ** 0.5, finite=num_bad == 0)


@torch.no_grad()
def gradient_norms_of_parts(
    parts: Sequence[Iterable[nn.Parameter]], context: ParallelContext, device: torch.device
) -> list[float]:
    """L2 norm of the gradient of each part of the logical model, counted as in `global_gradient_norm`.

    Args:
        parts: as many on every rank, in the same order; with `context.zero1` some may be empty.
        device: of the gradients.

    Communicates:
        one all-reduce of two numbers a part over the tensor group; with `context.zero1` another over the data group.
    """
    sums = torch.stack([_sums_of_squares(part, context, device) for part in parts])
    return _add_over_ranks(sums, context).sum(dim=1).sqrt().tolist()


def _sums_of_squares(parameters: Iterable[nn.Parameter], context: ParallelContext, device: torch.device) -> Tensor:
    """What this rank adds to the sum over the ranks: of its shards, of its share of the replicated part; fp64 [2]."""
    sharded, replicated = [], []
    for param in parameters:
        if param.grad is not None:
            (replicated if param.shard.replicated else sharded).append(param.grad)
    # The replicated part is the same on every rank; its mean is itself, and carries an inf of any rank to all.
    return torch.stack([_sum_of_squares(sharded, device), _sum_of_squares(replicated, device) / context.tp_size])


def _add_over_ranks(sums: Tensor, context: ParallelContext) -> Tensor:
    totals = sum_over_tensor_ranks(sums, context)
    return sum_over_data_ranks(totals, context) if context.zero1 else totals


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Norms in fp32 at least: squares of fp16 gradients overflow at 256.
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)
    return torch.stack(norms).double().square().sum()
