"""GLUE's scores, in percent or times 100, from predicted and true classes or numbers."""

import math

import numpy as np


def accuracy(found: list[int], labels: list[int]) -> float:
    """The share of correct predictions."""
    return 100.0 * sum(a == b for a, b in zip(found, labels, strict=True)) / len(labels)


def f1(found: list[int], labels: list[int]) -> float:
    """F1 of class 1: 2 TP / (2 TP + FP + FN), or 0 where it is neither predicted nor true."""
    hits = sum(a == b == 1 for a, b in zip(found, labels, strict=True))
    counted = found.count(1) + labels.count(1)
    return 200.0 * hits / counted if counted else 0.0


def matthews(found: list[int], labels: list[int]) -> float:
    """Matthews correlation of any number of classes; 0, as in scikit-learn, where one side has a single class.

    Source: Gorodkin 2004.
    """
    counts = np.zeros((2, 1 + max(*found, *labels)))
    for side, values in enumerate((found, labels)):
        np.add.at(counts[side], values, 1)
    hits, total = sum(a == b for a, b in zip(found, labels, strict=True)), len(labels)
    spreads = total**2 - (counts**2).sum(axis=1)
    if not spreads.all():
        return 0.0
    return 100.0 * float((hits * total - counts[0] @ counts[1]) / np.sqrt(spreads.prod()))


def pearson(found: list[float], labels: list[float]) -> float:
    """Pearson correlation; nan where one side is constant."""
    return _correlation("pearsonr", found, labels)


def spearman(found: list[float], labels: list[float]) -> float:
    """Spearman correlation, with the mean rank of ties; nan where one side is constant."""
    return _correlation("spearmanr", found, labels)


def _correlation(name: str, found: list[float], labels: list[float]) -> float:
    import scipy.stats  # takes a second

    is_constant = min(len({*found}), len({*labels})) < 2
    return math.nan if is_constant else 100.0 * float(getattr(scipy.stats, name)(found, labels).statistic)


METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews, "pearson": pearson, "spearman": spearman}
