"""The data-order certificate: any other sample, or any other order, gives another digest; no layout does."""

import torch

from lmscale.data.data_digest import digest_number, digest_of_samples, digest_text, expected_digest
from lmscale.data.sampler import GlobalBatchSampler


def consumed(sampler: GlobalBatchSampler) -> torch.Tensor:
    """The digest as the training adds it up, a step at a time."""
    total = torch.zeros((), dtype=torch.int64)
    for step in sampler:
        numbers, _, indices = (torch.tensor(column) for column in zip(*step, strict=True))
        total += digest_of_samples(numbers, indices)
    return total


def test_what_ranks_add_up_is_what_is_expected_at_any_layout_and_over_epochs() -> None:
    steps = 23  # 276 samples of 100 in an epoch
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


def test_two_samples_that_change_places_are_noticed() -> None:
    numbers = torch.arange(1000)
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    digest = digest_of_samples(numbers, indices)
    seen = set()
    for place in range(999):
        swapped = indices.clone()
        swapped[[place, place + 1]] = indices[[place + 1, place]]
        seen.add(int(digest_of_samples(numbers, swapped)))
    assert int(digest) not in seen and len(seen) == 999


def test_a_digest_survives_its_text() -> None:
    for number in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        assert digest_number(digest_text(number)) == number
