"""Replicated tensors: the gradients that the ranks agree on, and the hashes that find a difference."""

import dataclasses
import sys

import pytest
import torch
from ranks import make_context, run_ranks

from lmscale.parallel import ParallelContext, fingerprint, first_difference, sync_replicated_gradients
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


fingerprints = sys.modules[fingerprint.__module__]
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_tensors_have_equal_hashes_at_any_layout_in_memory(monkeypatch, dtype) -> None:
    x = (100 * torch.rand(40, 50)).to(dtype)
    whole = fingerprint(x)
    assert whole == fingerprint(x.clone()) == fingerprint(x.t().contiguous().t())
    monkeypatch.setattr(fingerprints, "_CHUNK", 17)
    assert fingerprint(x) == whole


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("first", "second"), [(1, -1), (1, 2), (0, 1), (3, 192)])
@pytest.mark.parametrize("distance", [1, 2, 2048, 2**20])
def test_a_change_and_a_swap_of_two_values_are_seen(dtype, first: int, second: int, distance: int) -> None:
    x = torch.zeros(2**20 + 8, dtype=dtype)
    x[5], x[5 + distance] = first % 256, second % 256
    if dtype.is_floating_point:
        x[5], x[5 + distance] = first, second
    changed, swapped = x.clone(), x.clone()
    changed[5] = x[5 + distance]
    swapped[5], swapped[5 + distance] = x[5 + distance].clone(), x[5].clone()
    assert len({int(fingerprint(each)) for each in (x, changed, swapped)}) == 3


def test_a_change_that_is_lost_in_products_with_even_numbers_is_seen() -> None:
    # x ^ (x >> 32) of the second differs from that of the first in the highest bit alone.
    assert fingerprint(torch.tensor([0])) != fingerprint(torch.tensor([-(2**63) + 2**31]))


def _differ_on_rank_1(rank: int) -> list[str | None]:
    group = make_context(tp_size=2).tp_group
    tensors = {"equal": torch.ones(3), "other": torch.tensor([1.0, float(rank)])}
    return [first_difference(named, group) for named in ({"equal": tensors["equal"]}, tensors, {})]


def test_the_first_tensor_that_differs_between_ranks_is_named_on_all_of_them() -> None:
    assert run_ranks(_differ_on_rank_1, 2) == [[None, "other", None]] * 2


def test_zeros_of_different_sign_differ_and_nan_equals_itself() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([float("nan")])) == fingerprint(torch.tensor([float("nan")]))
