"""The order of samples, also in a blend, does not depend on the layout, and any range of it can be computed alone."""

import numpy as np
import pytest
from corpora import epochs_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmscale.data.sampler import Blend, GlobalBatchSampler

NUM_SAMPLES, BATCH, STEPS = 37, 12, 11  # 132 sequences: three epochs and a half, borders inside batches


def steps(dp_rank: int = 0, dp_size: int = 1, seed: int = 5, start: int = 0) -> list[list[list[int]]]:
    """For each step the references (sample number, epoch, index) of its samples."""
    return [step.tolist() for step in epochs_of(NUM_SAMPLES, BATCH, dp_rank, dp_size, seed, STEPS, start)]


def test_every_epoch_has_every_sample_once_in_a_new_order() -> None:
    seen = [reference for step in steps() for reference in step]
    assert [number for number, _, _ in seen] == list(range(BATCH * STEPS))
    epochs = [[index for _, epoch, index in seen if epoch == e] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_smaller_than_a_batch_wraps_around() -> None:
    batch = next(iter(epochs_of(5, 12, 0, 1, 1, 1)))
    assert [epoch for _, epoch, _ in batch] == [0] * 5 + [1] * 5 + [2] * 2


def test_references_of_a_range_are_those_of_its_steps() -> None:
    sampler = epochs_of(NUM_SAMPLES, BATCH, 0, 1, 5, STEPS)
    assert sampler.references(30, 50).tolist() == [row for step in steps() for row in step][30:50]


def test_a_blend_refers_to_the_samples_of_each_dataset_in_its_own_order() -> None:
    class Ordered:
        def __init__(self, size: int) -> None:
            self.size = size

        def order(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return places // self.size, self.size - 1 - places % self.size

    datasets, blend = [Ordered(7), Ordered(3)], Blend([3, 1])
    ranks = [GlobalBatchSampler([each.order for each in datasets], blend, 6, rank, 2, 4) for rank in range(2)]
    found = [row for step in zip(*ranks, strict=True) for share in step for row in share.tolist()]
    which, places = (values.tolist() for values in blend.assign(0, 24))
    sizes = [datasets[number].size for number in which]
    assert found == [
        [n, place // size, (number << 40) + size - 1 - place % size]
        for n, (number, place, size) in enumerate(zip(which, places, sizes, strict=True))
    ]


WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, num_samples=st.integers(1, 600))
@example(weights=[1.0] * 20, num_samples=7)  # the first sample has time 10
def test_every_prefix_has_each_dataset_within_the_stated_bound(weights, num_samples) -> None:
    blend = Blend(weights)
    which, places = blend.assign(0, num_samples)
    given_so_far = np.cumsum(which[:, None] == np.arange(len(weights)), axis=0)
    shares = np.array(weights) / sum(weights)
    distance = np.abs(given_so_far - np.arange(1, num_samples + 1)[:, None] * shares)
    assert (distance <= 0.5 + shares * max(len(weights) - 2, 0) / 2 + 1e-9).all()
    for dataset in range(len(weights)):
        assert np.array_equal(places[which == dataset], np.arange((which == dataset).sum()))


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, first=st.integers(0, 10**10), length=st.integers(0, 200), data=st.data())
def test_a_range_equals_that_part_of_a_longer_range(weights, first, length, data) -> None:
    blend = Blend(weights)
    which, places = blend.assign(first, first + length)
    begin = data.draw(st.integers(0, length))
    end = data.draw(st.integers(begin, length))
    part = blend.assign(first + begin, first + end)
    assert np.array_equal(part[0], which[begin:end]) and np.array_equal(part[1], places[begin:end])
    before, after = blend.counts(first), blend.counts(first + length)
    assert sum(before) == first and sum(after) == first + length
    assert np.bincount(which, minlength=len(weights)).tolist() == [b - a for a, b in zip(before, after, strict=True)]


def test_only_the_ratio_of_the_weights_matters() -> None:
    assert np.array_equal(Blend([1, 3]).assign(0, 100)[0], Blend([0.5, 1.5]).assign(0, 100)[0])
    assert Blend([1, 3]).assign(0, 8)[0].tolist() == [1, 0, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_above_0_raises(weight) -> None:
    with pytest.raises(ValueError, match="a dataset's weight must be above 0, but is"):
        Blend([1.0, weight])
