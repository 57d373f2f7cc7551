"""Tests, intervals and fits of the second norm-order study against scipy's values."""

import math

import pandas as pd
import pytest

from analysis.norm_order.limits import exponent, slope_test
from analysis.norm_order.significance import (
    binomial_tail,
    clopper_pearson,
    holm,
    mcnemar,
    paired_t,
    sign_test,
    student_quantile,
    student_tail,
)


def test_tests_and_intervals_have_scipys_values() -> None:
    """Of scipy 1.17.1: stats.t, ttest_1samp, binomtest."""
    tails = {(0.5, 1): 0.35241638234956674, (2.0, 3): 0.06966298427942152, (2.3646, 7): 0.02500089184368218}
    tails |= {(4.0, 8): 0.0019748864017226616, (1.3, 10): 0.1113829086034223, (-1.1, 4): 0.833458175226223}
    for (t, degrees), p in tails.items():
        assert student_tail(t, degrees) == pytest.approx(p, rel=1e-12)
    quantiles = {3: 3.1824463052837078, 7: 2.364624251592784, 8: 2.306004135204166, 12: 2.1788128296672287}
    assert {n: student_quantile(0.975, n) for n in quantiles} == pytest.approx(quantiles, rel=1e-12)
    t = paired_t([-0.15, -0.12, -0.17, -0.13, -0.16, -0.11, -0.14, -0.18])
    wanted = {"effect": -0.145, "low": -0.16547824672284117, "high": -0.12452175327715885, "p": 6.631035211802115e-07}
    assert t == pytest.approx(wanted, rel=1e-8)
    assert clopper_pearson(0, 8) == pytest.approx((0.0, 0.3694166475528192))
    assert clopper_pearson(38, 41) == pytest.approx((0.8007540216233371, 0.9846485284665834))
    assert clopper_pearson(41, 41) == pytest.approx((0.9139561637059666, 1.0))
    assert (mcnemar(8, 0), mcnemar(7, 1), mcnemar(7, 0)) == (0.00390625, 0.03515625, 0.0078125)
    assert (mcnemar(0, 0), binomial_tail(13, 15)) == (1.0, 0.003692626953125)
    assert (sign_test(0, 8), sign_test(7, 1), sign_test(4, 4), sign_test(5, 1)) == (0.0078125, 0.0703125, 1.0, 0.21875)


def test_holm_steps_down_and_never_decreases() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.004] + [1.0] * 11) == pytest.approx([0.048] + [1.0] * 11)
    assert holm([0.0078125] * 2 + [1.0] * 10)[0] > 0.05  # 7 of 7 pairs reject only after stronger tests


def test_slopes_and_their_difference_have_the_values_of_a_regression() -> None:
    """Of scipy 1.17.1: linregress gives slopes -0.5 and -1.75 with standard errors 0.25 and 0.26020824993326676."""
    layers = [6, 6, 12, 12, 24, 24]
    pre = pd.DataFrame({"layers": layers, "place": [8, 7, 7, 7, 6, 7]})
    post = pd.DataFrame({"layers": layers, "place": [6, 6, 4, 5, 3, 2]})
    k = exponent(post)
    assert k["k"] == pytest.approx(1.75) and k["high"] - k["k"] == pytest.approx(2.7764451 * 0.26020825, rel=1e-6)
    assert (k["k_deepest_higher"], k["k_deepest_lower"]) == pytest.approx((1.25, 2.25))
    test = slope_test(post, pre)
    error = math.hypot(0.25, 0.26020824993326676)  # equal degrees: the pooled variance is the mean of both
    assert test["effect"] == pytest.approx(-1.25) and test["p"] == pytest.approx(student_tail(1.25 / error, 8))
    assert test["high"] == pytest.approx(-1.25 + 2.306004135 * error) and test["p_unfavourable"] > test["p"]


def test_limits_on_a_line_have_the_variance_of_rounding() -> None:
    layers = [6, 6, 12, 12, 24, 24]
    flat = pd.DataFrame({"layers": layers, "place": [5] * 6})
    steep = pd.DataFrame({"layers": layers, "place": [6, 6, 5, 5, 4, 4]})
    assert exponent(flat)["high"] == pytest.approx(2.7764451 * (1 / 12 / 4) ** 0.5)
    assert slope_test(steep, flat)["p"] == pytest.approx(student_tail(1 / (1 / 12 / 2) ** 0.5, 8))
    assert slope_test(flat, flat)["p"] == 0.5 and slope_test(flat, steep)["p"] > 0.99
