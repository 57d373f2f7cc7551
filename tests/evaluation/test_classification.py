"""Accuracy and F1 against counts by hand."""

import pytest

from lmscale.evaluation.classification import accuracy, accuracy_by_group, binary_f1

PREDICTIONS, LABELS = [1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 1, 1, 0, 0]


def test_accuracy_is_the_percentage_of_equal_classes() -> None:
    assert accuracy(PREDICTIONS, LABELS) == pytest.approx(100 * 4 / 7)


def test_f1_is_that_of_the_duplicates() -> None:
    assert binary_f1(PREDICTIONS, LABELS) == pytest.approx(100 * 2 * 2 / (2 * 2 + 2 + 1))
    predictions, labels = [1 - p for p in PREDICTIONS], [1 - label for label in LABELS]
    assert binary_f1(predictions, labels) == pytest.approx(100 * 2 * 2 / (2 * 2 + 1 + 2))


def test_f1_of_an_absent_class_is_0() -> None:
    assert binary_f1([0, 0], [0, 0]) == 0.0


def test_groups_are_scored_separately_and_together() -> None:
    groups = ["middle", "high", "high", "middle", "middle", "high", "high"]
    found = accuracy_by_group(PREDICTIONS, LABELS, groups)
    assert found == pytest.approx({"all": 100 * 4 / 7, "middle": 100 * 2 / 3, "high": 50.0})
    assert list(found) == ["all", "middle", "high"]


@pytest.mark.parametrize("score", [accuracy, binary_f1])
def test_empty_lists_and_lists_of_different_lengths_raise(score) -> None:
    for predictions, labels in ([], []), ([1], [1, 0]):
        with pytest.raises(ValueError, match="must equal that of labels"):
            score(predictions, labels)


def test_a_group_cannot_be_called_all() -> None:
    with pytest.raises(ValueError, match="'all'"):
        accuracy_by_group([1], [1], ["all"])
