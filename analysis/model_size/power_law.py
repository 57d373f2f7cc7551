"""Loss against size: power laws through the means of several runs a size, with error bars from their spread."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SIZES, MIN_RUNS = 3, 2
# 97.5 % quantile by degrees of freedom; beyond the last it is a little wide.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
PERCENTILES = (2.5, 97.5)
_NUM_FLOORS, _NUM_SEARCHES = 60, 3  # tried over the whole range, then between the neighbours of the best, and again


@dataclass(frozen=True)
class PowerLaw:
    """y = a x^-b + c.

    Args:
        a, b, c: c is the floor, 0 where there is none.
        b_interval, c_interval: 95 %, from the spread of the runs of a size; (0, 0) for no floor. What other seeds would
            change if the law were right.
        b_line_interval: 95 % of b, from how far the sizes' means lie from the law (Student's t), which a wrong form
            widens; None with a floor.
        lack_of_fit: variance of the means about the law over that of the runs about their means, F; near 1 where the
            law is right. None with a floor, or where runs do not differ.
        r_squared: share of the variance of log y that the law explains.
        largest_residual: of a size's mean, relative.
    """

    a: float
    b: float
    c: float
    b_interval: tuple[float, float]
    b_line_interval: tuple[float, float] | None
    lack_of_fit: float | None
    c_interval: tuple[float, float]
    r_squared: float
    largest_residual: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """y at x, as shaped."""
        return self.a * np.asarray(x, dtype=float) ** -self.b + self.c


def fit_power_law(
    x: Sequence[float], runs: Sequence[Sequence[float]], *, floor: bool, num_resamples: int = 1000
) -> PowerLaw:
    """The law of least squares in log y through the means of the runs.

    The intervals are those of a parametric bootstrap: runs of one size are taken to scatter in log y by the same
    standard deviation at every size, which all sizes together estimate, and the means are drawn anew with it. They say
    what other seeds would change, not whether a power law is right: for that see `lack_of_fit` and `b_line_interval`.

    Args:
        x: sizes, above 0, all different.
        runs: y of the runs of each size, above 0.
        floor: fit c too; otherwise it is 0.
        num_resamples: of the bootstrap, whose generator starts from 0.

    Raises:
        ValueError: fewer than 3 sizes (4 with a floor), or a size with fewer than 2 runs.
    """
    needed = MIN_SIZES + floor
    if len(set(x)) < needed:
        raise ValueError(f"a power law must have at least {needed} sizes, but there are {len(set(x))}")
    for size, values in zip(x, runs, strict=True):
        if len(values) < MIN_RUNS:
            raise ValueError(f"every size must have at least {MIN_RUNS} runs, but {size:g} has {len(values)}")
    log_x, logs = np.log(np.asarray(x, dtype=float)), [np.log(np.asarray(values, dtype=float)) for values in runs]
    y = np.array([np.mean(values) for values in runs])
    scatter = np.sqrt(sum(((v - v.mean()) ** 2).sum() for v in logs) / sum(len(v) - 1 for v in logs))
    errors = scatter / np.sqrt([len(v) for v in logs])  # of the means, in log y
    drawn = y * np.exp(np.random.default_rng(0).normal(size=(num_resamples, len(y))) * errors)
    a, b, c = (value[0] for value in _least_squares(log_x, y[None], floor))
    _, resampled_b, resampled_c = _least_squares(log_x, drawn, floor)
    fitted = a * np.exp(-b * log_x) + c
    residuals, spread = np.log(y / fitted), np.log(y) - np.log(y).mean()
    line_interval = f_value = None
    if not floor:
        freedom = len(y) - 2
        half = STUDENT_T[min(freedom, max(STUDENT_T))] * np.sqrt(
            (residuals**2).sum() / freedom / ((log_x - log_x.mean()) ** 2).sum()
        )
        line_interval = (float(b - half), float(b + half))
        about = sum(len(v) * r**2 for v, r in zip(logs, residuals, strict=True)) / freedom
        f_value = float(about / scatter**2) if scatter > 0 else None
    return PowerLaw(
        float(a),
        float(b),
        float(c),
        tuple(float(bound) for bound in np.percentile(resampled_b, PERCENTILES)),
        line_interval,
        f_value,
        tuple(float(bound) for bound in np.percentile(resampled_c, PERCENTILES)),
        float(1 - (residuals**2).sum() / (spread**2).sum()),
        float(np.abs(y / fitted - 1).max()),
    )


def _least_squares(log_x: np.ndarray, y: np.ndarray, floor: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a, b and c, each [r], of the rows of y [r, n].

    For a given floor it is a straight line through log(y - c). A residual d there is one of d (y - c) / y in log y, to
    first order, hence the weights; the floor of least squares in log y is then searched for.
    """
    rows, floors = np.arange(len(y)), np.zeros((len(y), 1))
    a, b, errors = _lines(log_x, y, floors)
    if floor:
        lowest, highest = np.zeros(len(y)), 0.999 * y.min(axis=-1)
        for _ in range(_NUM_SEARCHES):
            floors = np.linspace(lowest, highest, _NUM_FLOORS, axis=-1)  # [r, k]
            a, b, errors = _lines(log_x, y, floors)
            best = errors.argmin(axis=-1)
            lowest = floors[rows, np.maximum(best - 1, 0)]
            highest = floors[rows, np.minimum(best + 1, _NUM_FLOORS - 1)]
    best = errors.argmin(axis=-1)
    return a[rows, best], b[rows, best], floors[rows, best]


def _lines(log_x: np.ndarray, y: np.ndarray, floors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a, b and the summed squares of the residuals in log y, each [r, k], for y [r, n] and floors [r, k]."""
    above = y[:, None] - floors[:, :, None]  # [r, k, n]
    weights, z = (above / y[:, None]) ** 2, np.log(above)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    mean_x, mean_z = (weights * log_x).sum(axis=-1, keepdims=True), (weights * z).sum(axis=-1, keepdims=True)
    slopes = (weights * (log_x - mean_x) * (z - mean_z)).sum(axis=-1) / (weights * (log_x - mean_x) ** 2).sum(axis=-1)
    a, b = np.exp(mean_z[..., 0] - slopes * mean_x[..., 0]), -slopes
    fitted = a[..., None] * np.exp(-b[..., None] * log_x) + floors[:, :, None]
    return a, b, (np.log(y[:, None] / fitted) ** 2).sum(axis=-1)
