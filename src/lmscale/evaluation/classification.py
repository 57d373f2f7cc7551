"""Accuracy and F1 of predicted classes, in percent: MNLI's two sets, QQP, RACE's two levels."""

from collections.abc import Sequence


def accuracy(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Share of the predictions that are the label, in percent.

    Raises:
        ValueError: numbers that differ, or none.
    """
    _check(predictions, labels)
    return 100.0 * sum(p == label for p, label in zip(predictions, labels, strict=True)) / len(labels)


def binary_f1(predictions: Sequence[int], labels: Sequence[int], positive: int = 1) -> float:
    """F1 of one class, in percent: 2 TP / (2 TP + FP + FN), 0 where the class neither occurs nor is predicted.

    Raises:
        ValueError: numbers that differ, or none.

    Source: GLUE's score of QQP (Wang et al. 2018).
    """
    _check(predictions, labels)
    hits = sum(p == label == positive for p, label in zip(predictions, labels, strict=True))
    counted = sum(p == positive for p in predictions) + sum(label == positive for label in labels)
    return 200.0 * hits / counted if counted else 0.0


def accuracy_by_group(predictions: Sequence[int], labels: Sequence[int], groups: Sequence[str]) -> dict[str, float]:
    """Accuracy over all and in each group (RACE: middle and high; MNLI pooled: matched and mismatched), in percent.

    Returns:
        `all`, then the groups in the order in which they first occur.

    Raises:
        ValueError: numbers that differ, none, or a group called `all`.
    """
    _check(predictions, labels)
    _check(groups, labels)
    if "all" in groups:
        raise ValueError("a group must have another name than 'all', which stands for the whole")
    found = {"all": accuracy(predictions, labels)}
    for group in dict.fromkeys(groups):
        mine = [i for i, name in enumerate(groups) if name == group]
        found[group] = accuracy([predictions[i] for i in mine], [labels[i] for i in mine])
    return found


def _check(predictions: Sequence, labels: Sequence) -> None:
    if len(predictions) != len(labels) or len(labels) == 0:
        raise ValueError(
            f"predictions must be as many as labels ({len(labels)}), and some, but there are {len(predictions)}"
        )
