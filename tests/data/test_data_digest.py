"""The data digest depends on the samples and their order, and not on the layout."""

import torch

from lmscale.data.data_digest import digest_number, digest_of_samples, digest_text, expected_digest
from lmscale.data.sampler import GlobalBatchSampler


def consumed(sampler: GlobalBatchSampler) -> torch.Tensor:
    """The digest as training computes it, step by step."""
    total = torch.zeros((), dtype=torch.int64)
    for step in sampler:
        numbers, _, indices = (torch.tensor(column) for column in zip(*step, strict=True))
        total += digest_of_samples(numbers, indices)
    return total


def test_ranks_sum_to_the_expected_digest_at_any_layout_and_over_epochs() -> None:
    steps = 23  # 276 samples, 100 per epoch
    expected = expected_digest(GlobalBatchSampler(100, 12, 0, 1, 7, steps), steps)
    for dp_size in (1, 2, 3):
        ranks = [GlobalBatchSampler(100, 12, rank, dp_size, 7, steps) for rank in range(dp_size)]
        assert sum(consumed(rank) for rank in ranks) == expected
    for num_shares in (2, 5):
        sampler = GlobalBatchSampler(100, 12, 0, 1, 7, steps)
        assert sum(expected_digest(sampler, steps, share, num_shares) for share in range(num_shares)) == expected


def test_another_seed_corpus_length_or_number_of_steps_gives_another_digest() -> None:
    digests = {
        digest_text(int(expected_digest(GlobalBatchSampler(size, 12, 0, 1, seed, 9), steps)))
        for size in (100, 101)
        for seed in (1, 2)
        for steps in (8, 9)
    }
    assert len(digests) == 8


def test_swapped_samples_change_the_digest() -> None:
    numbers = torch.arange(1000)
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    digest = digest_of_samples(numbers, indices)
    seen = set()
    for place in range(999):
        swapped = indices.clone()
        swapped[[place, place + 1]] = indices[[place + 1, place]]
        seen.add(int(digest_of_samples(numbers, swapped)))
    assert int(digest) not in seen and len(seen) == 999


def test_a_digest_round_trips_through_text() -> None:
    for number in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        assert digest_number(digest_text(number)) == number
