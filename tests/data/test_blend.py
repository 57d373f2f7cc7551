"""Blends: counts of every prefix close to the weights, and ranges computed independently."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmscale.data.sampler import Blend

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
