"""Power laws of loss against size, fitted to the means of several runs per size, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SIZES, MIN_RUNS = 3, 2
# 97.5 % quantile by degrees of freedom; the last entry serves all larger ones, for which it is slightly too wide.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
PERCENTILES = (2.5, 97.5)
_NUM_FLOORS, _NUM_SEARCHES = 60, 3  # a grid over the whole range, refined twice around the best floor


@dataclass(frozen=True)
class PowerLaw:
    """y = a x^-b + c.

    Args:
        a, b, c: coefficients; c is the floor, 0 for a law without one.
        b_interval, c_interval: 95 % intervals from the spread over seeds, assuming that the law is right; (0, 0) for c
            without a floor.
        b_line_interval: 95 % interval of b from the residuals of the means (Student's t), which a wrong functional form
            widens; None with a floor.
        lack_of_fit: F statistic, the variance of the means about the law over the variance of the runs about their
            means; near 1 if the law is right. None with a floor, or if the runs of each size are identical.
        r_squared: share of the variance of log y that the law explains.
        largest_residual: largest relative residual of a mean.
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
        """Evaluate the law; the result has the shape of x."""
        return self.a * np.asarray(x, dtype=float) ** -self.b + self.c


def fit_power_law(
    x: Sequence[float], runs: Sequence[Sequence[float]], *, floor: bool, num_resamples: int = 1000
) -> PowerLaw:
    """Fit a power law to the means of the runs by least squares in log y.

    The intervals come from a parametric bootstrap of the means. It assumes the same standard deviation of log y over
    seeds at every size, estimated from all sizes together. The intervals describe the variation over seeds, not
    whether a power law fits: for that see `lack_of_fit` and `b_line_interval`.

    Args:
        x: sizes, above 0, all different.
        runs: y of the runs of each size, above 0.
        floor: also fit c; otherwise c is 0.
        num_resamples: bootstrap samples, drawn with seed 0.

    Raises:
        ValueError: fewer than 3 sizes (4 with a floor), or a size with fewer than 2 runs.
    """
    needed = MIN_SIZES + floor
    if len(set(x)) < needed:
        raise ValueError(f"a power law needs at least {needed} sizes, but there are {len(set(x))}")
    for size, values in zip(x, runs, strict=True):
        if len(values) < MIN_RUNS:
            raise ValueError(f"each size must have at least {MIN_RUNS} runs, but {size:g} has {len(values)}")
    log_x, logs = np.log(np.asarray(x, dtype=float)), [np.log(np.asarray(values, dtype=float)) for values in runs]
    y = np.array([np.mean(values) for values in runs])
    scatter = np.sqrt(sum(((v - v.mean()) ** 2).sum() for v in logs) / sum(len(v) - 1 for v in logs))
    errors = scatter / np.sqrt([len(v) for v in logs])  # standard errors of the means, in log y
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
    """Fit a, b and c, each [r], to the rows of y [r, n].

    For a given floor c the fit is a straight line through log(y - c). To first order, a residual d of that line is a
    residual d (y - c) / y in log y, hence the weights. The floor is found by a grid search.
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
    """Fit a and b for y [r, n] at given floors [r, k]; returns a, b and the sums of squared residuals, each [r, k]."""
    above = y[:, None] - floors[:, :, None]  # [r, k, n]
    weights, z = (above / y[:, None]) ** 2, np.log(above)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    mean_x, mean_z = (weights * log_x).sum(axis=-1, keepdims=True), (weights * z).sum(axis=-1, keepdims=True)
    slopes = (weights * (log_x - mean_x) * (z - mean_z)).sum(axis=-1) / (weights * (log_x - mean_x) ** 2).sum(axis=-1)
    a, b = np.exp(mean_z[..., 0] - slopes * mean_x[..., 0]), -slopes
    fitted = a[..., None] * np.exp(-b[..., None] * log_x) + floors[:, :, None]
    return a, b, (np.log(y[:, None] / fitted) ** 2).sum(axis=-1)
