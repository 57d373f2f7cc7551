"""The n-gram baseline is a probability distribution, agrees with a count by hand, and learns from context."""

import math

import numpy as np
import pytest

from analysis.demo.ngram import context_free_losses, kneser_ney_losses

V = 7


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_of_all_ids_after_any_context_sum_to_one(order) -> None:
    train = np.random.default_rng(0).integers(0, V - 1, 200) ** 2 % (V - 1)  # V - 1 never occurs
    for context in ([0, 1], [4, 4], [V - 1, 3], [V - 1, V - 1]):
        losses = [kneser_ney_losses(train, np.array([*context, last]), V, order)[-1] for last in range(V)]
        assert math.isclose(sum(math.exp(-loss) for loss in losses), 1.0, rel_tol=1e-12)


def test_a_bigram_of_six_ids_agrees_with_a_count_by_hand() -> None:
    # Bigrams of 0 1 0 1 0 2: 01 twice, 10 twice, 02 once. n1 = 1, n2 = 2: discount 1/5.
    # Left neighbours: 0, 1 and 2 have one each. n1 = 3, n2 = 0: discount 1, so the lower order is uniform, 1/3.
    losses = kneser_ney_losses(np.array([0, 1, 0, 1, 0, 2]), np.array([0, 1, 1, 2]), 3, 2)
    after_0, after_1 = (2 - 0.2) / 3 + 0.2 * 2 / 3 / 3, 0.2 * 1 / 2 / 3
    assert np.allclose(np.exp(-losses), [1 / 3, after_0, after_1, after_1], rtol=1e-12)


def test_a_longer_context_lowers_the_loss_of_text_that_depends_on_it() -> None:
    text = np.array([0, 0, 1, 1] * 100)  # two ids before determine the next one, one id does not
    one, two, three = (kneser_ney_losses(text, text[:40], V, order).mean() for order in (1, 2, 3))
    assert one > math.log(2) - 0.05 and two > math.log(2) - 0.1 and three < 0.15


def test_without_context_bert_knows_the_frequencies_and_what_its_position_shows() -> None:
    """Against the posterior of every pair of shown and scored id; V - 1 is [MASK], and never scored."""
    train, mask = np.array([0, 0, 0, 1, 1, 2, 3, 4, 5]), V - 1
    frequency = (np.bincount(train, minlength=V) + 1.0) / (len(train) + V)
    joint = 0.1 * frequency[None, :] / V + 0.1 * np.diag(frequency)  # [shown, scored]: drawn at random, or left
    expected = joint / joint.sum(axis=1, keepdims=True)
    expected[mask] = frequency  # a random id is [MASK] too rarely to count
    shown, scored = (ids.ravel() for ids in np.indices((V, V)))
    losses = context_free_losses(train, shown, scored, mask, V)
    np.testing.assert_allclose(np.exp(-losses), expected.ravel(), rtol=1e-12)
