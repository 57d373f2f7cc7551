"""Sum and norm of the gradients of a model with sharded and replicated parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .context import ParallelContext
from .data_collectives import sum_over_data_ranks
from .pipeline import sum_over_stages


@dataclass(frozen=True)
class GradientNorm:
    """Norm of the whole model's gradient, fp64 [], and whether all its elements are finite, bool []; on the device."""

    norm: Tensor
    finite: Tensor


@torch.no_grad()
def sync_replicated_gradients(parameters: Iterable[nn.Parameter], context: ParallelContext) -> None:
    """Make the gradients of replicated parameters the same on all ranks that hold them, to the bit.

    Partial gradients (`ShardSpec.grad_is_partial`) are added. Of the others all ranks have computed the same, but on
    GPUs not always the same bits: a compiled kernel is tuned by timing on each rank, and the sums over the data ranks
    run in a communicator of each tensor rank. All take rank 0's, so that the replicas of a parameter cannot drift.
    The sums of partial gradients run in a communicator of each data rank, which may add in a different order, so all
    data ranks take data rank 0's.

    Args:
        parameters: with `.shard` and `.grad`, which is changed in place.

    Communicates:
        one all-reduce of all such gradients over the tensor group; if some are partial, and without `context.zero1`,
        where no two data ranks hold the same, also a broadcast of them over the data group. Nothing if there are none.

    Source: Korthikanti et al. 2022, section 4.2.2, for the partial ones.
    """
    replicated = [p for p in parameters if p.shard.replicated]
    if context.tp_size == 1 or not replicated:
        return
    own = [p.grad if p.shard.grad_is_partial or context.tp_rank == 0 else torch.zeros_like(p.grad) for p in replicated]
    total = context.tp_communicator.all_reduce(torch.cat([grad.flatten() for grad in own]))
    if any(p.shard.grad_is_partial for p in replicated) and context.dp_size > 1 and not context.zero1:
        dist.broadcast(total, group=context.dp_group, group_src=0)
    parts = total.split([p.numel() for p in replicated])
    torch._foreach_copy_([p.grad for p in replicated], [x.view_as(p) for x, p in zip(parts, replicated, strict=True)])


def global_gradient_norm(
    parameters: Iterable[nn.Parameter], context: ParallelContext, device: torch.device
) -> GradientNorm:
    """L2 norm of the gradient of the logical model: shards are added over the tensor ranks, replicas counted once.

    All ranks get the same result, also about finiteness: all see an inf that one rank has when this is called. Before,
    `sync_replicated_gradients` has replaced the replicated gradients of tensor ranks above 0, with any inf that only
    they had. No host synchronization.

    Args:
        parameters: with `.shard` and `.grad`; with `context.zero1` only this data rank's parts of them.
        device: of the gradients.

    Communicates:
        one all-reduce of three numbers over the tensor group; with several stages another over the pipeline, and with
        `context.zero1` another over the data group.

    Source: section 4.2 (clipping of the global norm). Megatron-LM's `mpu/grads.py` counts replicated gradients on rank
    0 only; here every rank adds 1/p of its own copy.
    """
    sums = _sums_of_squares(parameters, context, device)
    bad = (~sums.isfinite()).any().double()
    sharded_sum, replicated_sum, num_bad = _add_over_ranks(torch.cat([sums, bad[None]]), context).unbind()
    return GradientNorm(norm=(sharded_sum + replicated_sum).sqrt(), finite=num_bad == 0)


@torch.no_grad()
def gradient_norms_of_parts(
    parts: Sequence[Iterable[nn.Parameter]], context: ParallelContext, device: torch.device
) -> list[float]:
    """L2 norm of the gradient of each part of the logical model, counted as in `global_gradient_norm`.

    Args:
        parts: the same number in the same order on every rank; with `context.zero1` some may be empty.
        device: of the gradients.

    Communicates:
        one all-reduce of two numbers per part over the groups of `global_gradient_norm`.
    """
    sums = torch.stack([_sums_of_squares(part, context, device) for part in parts])
    return _add_over_ranks(sums, context).sum(dim=1).sqrt().tolist()


def _sums_of_squares(parameters: Iterable[nn.Parameter], context: ParallelContext, device: torch.device) -> Tensor:
    """This rank's terms of the sum over the ranks: its shards, and 1/p of the replicated part; fp64 [2]."""
    parameters = list(parameters)
    sharded = [param.grad for param in parameters if not param.shard.replicated]
    replicated = [param.grad for param in parameters if param.shard.replicated]
    # The replicated part is the same on every rank, so its mean over the ranks is itself.
    return torch.stack([_sum_of_squares(sharded, device), _sum_of_squares(replicated, device) / context.tp_size])


def _add_over_ranks(sums: Tensor, context: ParallelContext) -> Tensor:
    totals = sum_over_stages(context.tp_communicator.all_reduce(sums), context)
    return sum_over_data_ranks(totals, context) if context.zero1 else totals


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # In fp32 at least: the squares of fp16 gradients overflow at 256.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.promote_types(gradients[0].dtype, torch.float32))
    return torch.stack(norms).double().square().sum()
