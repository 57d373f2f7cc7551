"""How far the best learning rate moves with the size, and what it costs to keep the one of the smallest size."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from .cells import ARM, SIZE, mean_losses

CONDITION = [*ARM, *SIZE, "tokens"]


def vertex(rates: Sequence[float], losses: Sequence[float]) -> float:
    """log2 of the rate at the vertex of the parabola in it through the lowest loss and its two neighbours.

    Args:
        rates: increasing.
        losses: one per rate, nan where it is not finite.

    Returns:
        nan if the lowest loss is at an end, because the best rate may be beyond it, or beside a loss that is nan.
    """
    best = int(np.nanargmin(losses)) if np.isfinite(losses).any() else 0
    if not 0 < best < len(rates) - 1:
        return math.nan
    here = slice(best - 1, best + 2)
    curvature, slope, _ = np.polyfit(np.log2(rates[here]), losses[here], 2)
    return float(-slope / (2 * curvature))


def best_rates(cells: pd.DataFrame) -> pd.DataFrame:
    """log2 of the best rate of every condition and seed (`vertex`): one row per `CONDITION`, one column per seed."""
    rows = {}
    for (*condition, seed), runs in cells.groupby([*CONDITION, "seed"]):
        runs = runs.sort_values("lr")
        rows.setdefault(tuple(condition), {})[seed] = vertex(runs["lr"].to_numpy(), runs["loss"].to_numpy())
    return pd.DataFrame(list(rows.values()), index=pd.MultiIndex.from_tuples(rows, names=CONDITION))


def references(cells: pd.DataFrame) -> dict[tuple, tuple]:
    """The condition that each one is compared with: the smallest size of its family, placement, QK-norm and tokens.

    It has the same parametrization, or is `standard` where that size has no runs of it: the base, where both are equal.
    Conditions with fewer than three rates, which have no best one, are left out.
    """
    cells = cells[cells.groupby(CONDITION)["lr"].transform("nunique") > 2]
    conditions = cells[[*CONDITION, "parameters"]].drop_duplicates().sort_values("parameters")
    found = {}
    for _, rows in conditions.groupby([*ARM[:-1], "tokens"]):
        smallest = rows[rows["parameters"] == rows["parameters"].min()].set_index("parametrization", drop=False)
        for row in rows.itertuples():
            arm = row.parametrization if row.parametrization in smallest.index else "standard"
            if arm in smallest.index:
                found[tuple(getattr(row, key) for key in CONDITION)] = tuple(smallest.loc[arm, CONDITION])
    return found


def _size(condition: tuple) -> tuple[int, int]:
    return condition[len(ARM) : len(CONDITION) - 1]


def shifts(cells: pd.DataFrame) -> pd.DataFrame:
    """Octaves from the reference's best rate to each condition's, one column per seed; the references are left out."""
    best = best_rates(cells)
    rows = {c: best.loc[c] - best.loc[r] for c, r in references(cells).items() if _size(c) != _size(r)}
    return pd.DataFrame(list(rows.values()), index=pd.MultiIndex.from_tuples(rows, names=CONDITION))


def pooled(shift: pd.DataFrame) -> tuple[float, int]:
    """Standard deviation over seeds, pooled over the conditions, and its degrees of freedom; nan, 0 without repeats."""
    counts = shift.count(axis=1)
    freedom = int((counts - 1).clip(lower=0).sum())
    squares = shift.sub(shift.mean(axis=1), axis=0).pow(2).to_numpy()
    return (math.sqrt(np.nansum(squares) / freedom), freedom) if freedom else (math.nan, 0)


def transfer(cells: pd.DataFrame) -> pd.DataFrame:
    """The shift and the penalty of every condition.

    Returns:
        indexed by `CONDITION`: `shift` (octaves, mean over seeds; nan where a seed has none); `least` and `most`, of
        the seeds; `low` and `high`, the plan's 95 % interval, whose standard deviation is pooled over the conditions of
        its family and placement, those that differ from the reference in depth apart from the others, as if these did
        not share the reference's runs; `penalty` (nats): mean loss at the reference's best
        rate of the grid minus the lowest mean loss; nan where a best rate is at an end, or that rate has not run;
        `gain` (nats): lowest mean loss of the reference minus that of the condition.
    """
    moved, compared = shifts(cells), references(cells)
    means = {condition: mean_losses(runs) for condition, runs in cells.groupby(CONDITION)}
    seeds = cells.groupby(CONDITION)["seed"].unique()
    rows = []
    groups = [(*c[: len(ARM) - 1], _size(c)[0] != _size(compared[c])[0]) for c in moved.index]
    for condition, group in zip(moved.index, groups, strict=True):
        shift = moved.loc[condition, sorted({*seeds[condition]} & {*seeds[compared[condition]]})]
        spread, freedom = pooled(moved[[other == group for other in groups]])
        half = stats.t.ppf(0.975, freedom) * spread / math.sqrt(len(shift)) if freedom else math.nan
        mean = shift.mean(skipna=False)
        reference, own = means[compared[condition]], means[condition]
        penalty = math.nan if math.isnan(mean) else own.get(reference.idxmin(), math.nan) - own.min()
        least, most = shift.min(skipna=False), shift.max(skipna=False)
        rows.append((mean, least, most, mean - half, mean + half, penalty, reference.min() - own.min()))
    columns = ["shift", "least", "most", "low", "high", "penalty", "gain"]
    return pd.DataFrame(rows, index=moved.index, columns=columns)
