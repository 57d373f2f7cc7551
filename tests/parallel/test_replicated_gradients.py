"""Gradients of replicated parameters after the ranks have agreed on them."""

import dataclasses

import pytest
import torch
from ranks import make_context, run_ranks

from lmscale.parallel import ParallelContext, sync_replicated_gradients
from lmscale.parallel.communicator import ProcessGroupCommunicator
from lmscale.parallel.shard_spec import parameter


def _synced(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients 1.5 + rank of a replicated, a partial and a sharded parameter."""
    context = make_context(tp_size=2)
    with torch.device("cpu"):
        made = [
            parameter(context, (3, 2)),
            parameter(context, (4,), grad_is_partial=True),
            parameter(context, (6,), shard_dim=0),
        ]
    parameters = [torch.nn.Parameter(param.detach().to(dtype)) for param in made]
    for param, source in zip(parameters, made, strict=True):
        param.shard = source.shard
    for param in parameters:
        param.grad = torch.full_like(param, 1.5 + rank)
    sync_replicated_gradients(parameters[2:3], context)  # none: a data rank may own no replicated parameter
    sync_replicated_gradients(parameters, context)
    return [param.grad for param in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicated_gradients_are_rank_0s_and_partial_ones_the_sum(dtype: torch.dtype) -> None:
    for rank, (replicated, partial, sharded) in enumerate(run_ranks(_synced, 2, dtype)):
        assert replicated.shape == (3, 2) and replicated.unique().tolist() == [1.5]
        assert partial.unique().tolist() == [1.5 + 2.5]
        assert sharded.unique().tolist() == [1.5 + rank]


class _AddsInAnotherOrder(ProcessGroupCommunicator):
    """Sums that differ in their last bits between data ranks, as those of NCCL may."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__(context.tp_group, context.tp_size)
        self.dp_rank = context.dp_rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) * (1 + self.dp_rank * torch.finfo(x.dtype).eps)


def _synced_over_data_ranks(rank: int) -> tuple[list[float], list[float]]:
    """Gradients, equal on the data ranks, after tensor groups have added in different orders: a partial one beside one
    that is not, and the other alone, on which data ranks do not agree here."""
    context, synced = make_context(tp_size=2, dp_size=2), []
    for kinds in ((True, False), (False,)):
        communicator = _AddsInAnotherOrder(context)
        cut = dataclasses.replace(context, tp_communicator=communicator)
        with torch.device("cpu"):
            parameters = [parameter(cut, (4,), grad_is_partial=is_partial) for is_partial in kinds]
        for param in parameters:
            param.grad = torch.full_like(param, 1.5 + context.tp_rank)
        sync_replicated_gradients(parameters, cut)
        synced.append(parameters[0].grad.tolist())
    return tuple(synced)


def test_data_ranks_take_the_same_sum_of_partial_gradients() -> None:
    added, first = [4.0] * 4, [1.5] * 4  # of both tensor ranks, of the first
    other = (torch.full((4,), 1.5) * (1 + torch.finfo(torch.float32).eps)).tolist()
    assert run_ranks(_synced_over_data_ranks, 4) == [(added, first), (added, first), (added, other), (added, other)]
