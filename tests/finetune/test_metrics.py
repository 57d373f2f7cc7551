"""GLUE's scores against scikit-learn and scipy."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from lmscale.finetune.metrics import METRICS


def random_sets(count: int):
    """Predicted and true classes of sets of 1 to 40 examples, every third of which has a single class on one side."""
    generator = np.random.default_rng(3)
    for number in range(count):
        size, classes = int(generator.integers(1, 41)), int(generator.integers(2, 5))
        found, labels = generator.integers(0, classes, (2, size))
        if number % 3 == 0:
            (found, labels)[number % 2][:] = generator.integers(0, classes)
        yield found.tolist(), labels.tolist()


def test_scores_of_classes_equal_those_of_scikit_learn() -> None:
    for found, labels in random_sets(1000):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of degenerate sets
            expected = {
                "accuracy": sklearn.metrics.accuracy_score(labels, found),
                "f1": sklearn.metrics.f1_score(labels, found, labels=[1], average=None, zero_division=0)[0],
                "matthews": sklearn.metrics.matthews_corrcoef(labels, found),
            }
        for name, value in expected.items():
            assert METRICS[name](found, labels) == pytest.approx(100 * value, rel=1e-12, abs=1e-10), (
                name,
                found,
                labels,
            )


def test_scores_of_numbers_equal_those_of_scipy() -> None:
    generator, expected = np.random.default_rng(4), {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr}
    for number in range(1000):
        size = int(generator.integers(2, 41))
        found, labels = generator.normal(0, 3, size).round(number % 4), generator.uniform(0, 5, size).round(1)
        if number % 5 == 0:
            (found, labels)[number % 2][:] = 2.5
        for name, function in expected.items():
            ours = METRICS[name](found.tolist(), labels.tolist())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = 100 * function(found, labels).statistic
            assert (math.isnan(ours) and math.isnan(theirs)) or ours == pytest.approx(theirs, rel=1e-12, abs=1e-10)
    assert math.isnan(METRICS["pearson"]([1.0], [2.0])) and math.isnan(METRICS["spearman"]([1.0], [2.0]))
