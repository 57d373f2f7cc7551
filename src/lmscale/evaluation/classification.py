"""Accuracy and F1 of predicted classes in percent, for MNLI, QQP and RACE."""

from collections.abc import Sequence


def accuracy(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Compute the fraction of correct predictions, in percent.

    Raises:
        ValueError: the lengths differ or are 0.
    """
    _check(predictions, labels)
    return 100.0 * sum(p == label for p, label in zip(predictions, labels, strict=True)) / len(labels)


def binary_f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Compute F1 of class 1 in percent: 2 TP / (2 TP + FP + FN), or 0 if it neither occurs nor is predicted.

    Raises:
        ValueError: the lengths differ or are 0.

    Source: GLUE's score of QQP (Wang et al. 2018).
    """
    _check(predictions, labels)
    hits = sum(p == label == 1 for p, label in zip(predictions, labels, strict=True))
    counted = sum(p == 1 for p in predictions) + sum(label == 1 for label in labels)
    return 200.0 * hits / counted if counted else 0.0


def accuracy_by_group(predictions: Sequence[int], labels: Sequence[int], groups: Sequence[str]) -> dict[str, float]:
    """Compute the accuracy of all items and of each group (for RACE: middle and high), in percent.

    Returns:
        `all`, then the groups in the order in which they first occur.

    Raises:
        ValueError: the lengths differ or are 0, or a group is called `all`.
    """
    _check(predictions, labels)
    _check(groups, labels)
    if "all" in groups:
        raise ValueError("a group must not be called 'all', the name of the total")
    found = {"all": accuracy(predictions, labels)}
    for group in dict.fromkeys(groups):
        mine = [i for i, name in enumerate(groups) if name == group]
        found[group] = accuracy([predictions[i] for i in mine], [labels[i] for i in mine])
    return found


def _check(predictions: Sequence, labels: Sequence) -> None:
    if len(predictions) != len(labels) or len(labels) == 0:
        raise ValueError(
            f"the number of predictions must equal that of labels ({len(labels)}) and be above 0, "
            f"but is {len(predictions)}"
        )
