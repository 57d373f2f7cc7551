"""The tokens of a rank with sequence parallelism, and the positions and dropout masks that belong to them."""

import pytest
import torch
from torch import Tensor

from lmscale.parallel import (
    ParallelContext,
    counter_dropout,
    gather_sequence,
    keys_of_own_tokens,
    positions_of_own_tokens,
    sample_dropout_keys,
    sequence_shard,
    site_keys,
)
from lmscale.parallel.communicator import SingleRankCommunicator
from lmscale.parallel.sequence_parallel import in_rank_order

S, H, PROBABILITY = 12, 5, 0.3
CASES = [(2, 1, False), (2, 3, False), (4, 2, False), (4, 6, False), (2, 4, True), (4, 6, True), (4, 3, True)]
pytestmark = pytest.mark.parametrize("tp_size, b, halves", CASES)


def contexts(tp_size: int, halves: bool, communicator: SingleRankCommunicator | None = None) -> list[ParallelContext]:
    """Of every rank, without a group."""
    options = {"sequence_parallel": True, "batch_halves": halves, "tp_communicator": communicator}
    return [ParallelContext(rank, tp_size, **options) for rank in range(tp_size)]


def own_tokens(tp_size: int, b: int, halves: bool) -> list[Tensor]:
    """Numbers of every rank's tokens among the b s of the micro-batch, int64 [b, s/p]."""
    parts = torch.arange(b * S).chunk(2 if halves and b % 2 == 0 else 1)
    return [torch.cat([part.chunk(tp_size)[rank].view(-1, S // tp_size) for part in parts]) for rank in range(tp_size)]


def test_a_rank_holds_its_part_of_the_tokens_and_of_each_half(tp_size: int, b: int, halves: bool) -> None:
    x, own = torch.randn(b, S, H), own_tokens(tp_size, b, halves)
    for context, tokens in zip(contexts(tp_size, halves), own, strict=True):
        assert torch.equal(sequence_shard(x, context), x.flatten(0, 1)[tokens])
        assert torch.equal(in_rank_order(x, context).flatten(0, 1), x.flatten(0, 1)[torch.cat(own).flatten()])


def test_the_micro_batch_is_gathered_in_the_order_of_its_samples(tp_size: int, b: int, halves: bool) -> None:
    x, d_y = torch.randn(2, b, S, H)

    class OtherRanks(SingleRankCommunicator):
        def all_gather(self, own: Tensor) -> Tensor:
            return torch.cat(parts)

    ranks = contexts(tp_size, halves, OtherRanks())
    parts = [sequence_shard(x, context).clone().requires_grad_() for context in ranks]
    for own, context in zip(parts, ranks, strict=True):
        y = gather_sequence(own, context)
        y.backward(d_y)
        assert torch.equal(y, x)
        assert torch.equal(own.grad, sequence_shard(d_y, context))


def test_positions_are_those_of_the_tokens(tp_size: int, b: int, halves: bool) -> None:
    table = torch.randn(S + 4, H)
    for context, own in zip(contexts(tp_size, halves), own_tokens(tp_size, b, halves), strict=True):
        assert torch.equal(positions_of_own_tokens(table, torch.empty(b, S // tp_size, H), context), table[own % S])


def test_masks_are_those_of_the_tokens_and_keys_in_the_region_those_of_the_samples(
    tp_size: int, b: int, halves: bool
) -> None:
    keys = site_keys(sample_dropout_keys(7, torch.arange(b)), 7)
    for context, tokens in zip(contexts(tp_size, halves), own_tokens(tp_size, b, halves), strict=True):
        own = keys_of_own_tokens(keys, S, slice(1, None, 3), context)
        for site in range(7):
            if site in (1, 4):
                assert torch.equal(own[site], keys[site])
                continue
            whole = counter_dropout(torch.ones(b, S, H), PROBABILITY, keys[site])
            part = counter_dropout(torch.ones(b, S // tp_size, H), PROBABILITY, own[site])
            assert torch.equal(part, whole.flatten(0, 1)[tokens])


def test_a_length_that_the_ranks_cannot_share_is_refused(tp_size: int, b: int, halves: bool) -> None:
    for context in contexts(tp_size, halves):
        with pytest.raises(ValueError, match=rf"must be a multiple of `tp_size` \({tp_size}\), but is {S + 1}$"):
            in_rank_order(torch.zeros(b, S + 1), context)
