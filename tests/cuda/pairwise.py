"""Few combinations of settings in which every two settings meet."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any


def pairs_of(factors: Mapping[str, Sequence]) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every pair of values of two different factors, as ((factor, value), (factor, value))."""
    return [((a, x), (b, y)) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]]


def pairwise(factors: Mapping[str, Sequence]) -> list[dict[str, Any]]:
    """Combinations of one value per factor that contain every pair of values; greedy, the same at every call."""
    missing = dict.fromkeys(pairs_of(factors))  # a set that keeps its order
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for factor, values in factors.items():
            if factor not in case:
                gains = [len(_met(case | {factor: value}, factors, missing)) for value in values]
                case[factor] = values[gains.index(max(gains))]
        for pair in _met(case, factors, missing):
            del missing[pair]
        cases.append({factor: case[factor] for factor in factors})
    return cases


def _met(case: Mapping[str, Any], factors: Iterable[str], missing: Mapping) -> list:
    """The missing pairs that a case contains, which may not have all factors yet."""
    chosen = [(factor, case[factor]) for factor in factors if factor in case]
    return [pair for pair in combinations(chosen, 2) if pair in missing]
