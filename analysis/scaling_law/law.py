"""The law of the loss in parameters N and tokens D, with intervals: a surface, approach 3 of Hoffmann et al.

Source: Hoffmann et al. 2022 (arXiv:2203.15556), section 3; Besiroglu et al. 2024 (arXiv:2404.10102): bootstrap. Their
exponents, and those of Kaplan et al. 2020 (arXiv:2001.08361) and Porian et al. 2024 (arXiv:2406.19146, RefinedWeb).
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

DELTA = 1e-3  # of Huber's loss on log L
EXPONENTS = np.linspace(0.05, 2.0, 40)  # searched for both
PERCENTILES = (2.5, 97.5)
MIN_SIZES, MIN_RUNS = 3, 6  # numbers of different N and D, and of runs, that a surface needs
PUBLISHED = pd.Series(  # of the best N in compute
    {
        "Kaplan et al. 2020, without embeddings": 0.73,
        "Hoffmann et al. 2022, approach 1": 0.50,
        "Hoffmann et al. 2022, approach 3": 0.46,
        "Besiroglu et al. 2024, approach 3 again": 0.513,
        "Porian et al. 2024, as Kaplan": 0.835,
        "Porian et al. 2024, rates tuned per size": 0.497,
    },
    name="exponent",
)


class Surface(NamedTuple):
    """L = irreducible + a N^-alpha + b D^-beta."""

    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def __call__(self, parameters: ArrayLike, tokens: ArrayLike) -> NDArray:
        """The loss."""
        n, d = np.asarray(parameters, dtype=float), np.asarray(tokens, dtype=float)
        return self.irreducible + self.a * n**-self.alpha + self.b * d**-self.beta

    @property
    def compute_exponent(self) -> float:
        """Of the N with the lowest loss for a compute of 6 N D: N ~ C^(beta / (alpha + beta))."""
        return self.beta / (self.alpha + self.beta)


def fit_surface(parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, start: Surface | None = None) -> Surface:
    """Fit `Surface` by variable projection, then by Huber's loss on log L.

    The law is linear in its first three numbers: for each pair of exponents, non-negative least squares gives them. The
    best pair is the start of a fit of all five, so the result does not depend on a guess.

    Args:
        start: of the fit of all five, in place of that search.

    Raises:
        ValueError: fewer than `MIN_SIZES` different N or D, or `MIN_RUNS` runs.
    """
    n, d, y = (np.asarray(values, dtype=float) for values in (parameters, tokens, losses))
    needed = (("sizes", np.unique(n), MIN_SIZES), ("numbers of tokens", np.unique(d), MIN_SIZES), ("runs", y, MIN_RUNS))
    for name, values, least in needed:
        if len(values) < least:
            raise ValueError(f"a law of size and tokens needs at least {least} {name}, but there are {len(values)}")
    n0, d0 = np.exp(np.log(n).mean()), np.exp(np.log(d).mean())  # to bring the three columns to the same order
    log_n, log_d, log_y = np.log(n / n0), np.log(d / d0), np.log(y)
    if start is None:
        initial = _project(log_n, log_d, y)
    else:
        initial = (start.irreducible, start.a * n0**-start.alpha, start.b * d0**-start.beta, start.alpha, start.beta)

    def residuals(values: NDArray) -> NDArray:
        e, a, b, alpha, beta = values
        return np.log(e + a * np.exp(-alpha * log_n) + b * np.exp(-beta * log_d)) - log_y

    low, high = np.array([0.0, 0.0, 0.0, 1e-3, 1e-3]), np.array([np.inf, np.inf, np.inf, 5.0, 5.0])
    inside = np.clip(initial, low + 1e-6, high - 1e-6)
    found = optimize.least_squares(residuals, inside, bounds=(low, high), loss="huber", f_scale=DELTA, x_scale="jac")
    e, a, b, alpha, beta = found.x.tolist()
    return Surface(e, float(a * n0**alpha), float(b * d0**beta), alpha, beta)


def _project(log_n: NDArray, log_d: NDArray, y: NDArray) -> tuple[float, ...]:
    """The pair of `EXPONENTS`, and the three linear numbers with it, of the least relative error."""
    best, found = np.inf, ()
    for alpha, beta in itertools.product(EXPONENTS, EXPONENTS):
        columns = np.column_stack([np.ones_like(y), np.exp(-alpha * log_n), np.exp(-beta * log_d)])
        scales, residual = optimize.nnls(columns / y[:, None], np.ones_like(y))
        if residual < best:
            best, found = residual, (*scales, alpha, beta)
    return found


def intervals(
    surface: Surface, parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, num_resamples: int
) -> NDArray:
    """95 % intervals of alpha, beta and the exponent of compute, by a bootstrap over the runs.

    It assumes that the law is right; `lack_of_fit` tests that.

    Args:
        surface: fitted to these runs.

    Shapes:
        returns [3, 2].
    """
    n, d, y = (np.asarray(values, dtype=float) for values in (parameters, tokens, losses))
    random, drawn = np.random.default_rng(0), []
    while len(drawn) < num_resamples:
        chosen = random.integers(0, len(y), len(y))
        if len(np.unique(n[chosen])) >= MIN_SIZES and len(np.unique(d[chosen])) >= MIN_SIZES:
            found = fit_surface(n[chosen], d[chosen], y[chosen], surface)
            drawn.append((found.alpha, found.beta, found.compute_exponent))
    return np.nanpercentile(np.array(drawn), PERCENTILES, axis=0).T


def lack_of_fit(surface: Surface, parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike) -> tuple[float, float]:
    """F of the means over seeds about the law against the runs about their means, in log L, and its p.

    Returns:
        nan, nan if no (N, D) has two runs, or there are no more (N, D) than numbers in the law.
    """
    n, d, y = (np.asarray(values, dtype=float) for values in (parameters, tokens, losses))
    logs, law = np.log(y), np.log(surface(n, d))
    groups = [(n == a) & (d == b) for a, b in {*zip(n.tolist(), d.tolist(), strict=True)}]
    between, within = len(groups) - len(surface), len(y) - len(groups)
    if between < 1 or within < 1:
        return math.nan, math.nan
    about_law = sum(here.sum() * (logs[here].mean() - law[here][0]) ** 2 for here in groups) / between
    about_means = sum(((logs[here] - logs[here].mean()) ** 2).sum() for here in groups) / within
    ratio = about_law / about_means
    return float(ratio), float(stats.f.sf(ratio, between, within))
