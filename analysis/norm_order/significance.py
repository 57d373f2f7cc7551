"""The tests and intervals of the second study (plan.md), without scipy: Student's t, signs, McNemar, Holm.

Sources: Student's t for whole degrees of freedom, Abramowitz and Stegun, 26.7.3 and 26.7.4; Clopper and Pearson 1934;
McNemar 1947, exact; Holm 1979. The tests compare with scipy's values.
"""

import math
import statistics
from collections.abc import Callable, Sequence

LEVEL = 0.05


def student_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's distribution with a whole number of degrees of freedom."""
    angle = math.atan(t / degrees**0.5)
    cosine, odd = math.cos(angle), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for i in range(degrees // 2):
        total += term
        term *= cosine**2 * (2 * i + 1 + odd) / (2 * i + 2 + odd)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total  # P(|T| < t), signed
    return min(max((1 - inside) / 2, 0.0), 1.0)


def student_quantile(share: float, degrees: int) -> float:
    """The t that a share of Student's distribution does not exceed, for shares of 0.5 or more."""
    high = 1.0
    while student_tail(high, degrees) > 1 - share:
        high *= 2
    return _root(lambda t: student_tail(t, degrees) - (1 - share), 0.0, high)


def paired_t(differences: Sequence[float]) -> dict[str, float]:
    """Mean of paired differences (`effect`), its 95 % interval (`low`, `high`) and the two-sided p."""
    mean, degrees = statistics.fmean(differences), len(differences) - 1
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = student_quantile(1 - LEVEL / 2, degrees) * error
    p = 2 * student_tail(abs(mean) / error, degrees)
    return {"effect": mean, "low": mean - half, "high": mean + half, "p": p}


def binomial_tail(successes: int, trials: int, chance: float = 0.5) -> float:
    """P(X >= successes)."""
    terms = (math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(successes, trials + 1))
    return min(math.fsum(terms), 1.0)


def sign_test(first: int, second: int) -> float:
    """Two-sided p of so many pairs in which the first, and in which the second, is lower."""
    return min(2 * binomial_tail(max(first, second), first + second), 1.0)


def mcnemar(gained: int, lost: int) -> float:
    """One-sided p of so many pairs in which only the second, and in which only the first, succeeds."""
    return binomial_tail(gained, gained + lost)


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """The exact 95 % interval of a share."""
    tail = LEVEL / 2
    low = _root(lambda chance: tail - binomial_tail(successes, trials, chance), 0.0, 1.0) if successes else 0.0
    if successes == trials:
        return low, 1.0
    return low, _root(lambda chance: 1 - binomial_tail(successes + 1, trials, chance) - tail, 0.0, 1.0)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order of the given ones; reject those below the level."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min((len(values) - rank) * values[index], 1.0))
        adjusted[index] = largest
    return adjusted


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is zero, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
