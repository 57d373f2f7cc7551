"""The second norm-order study: its cells with their outcomes, and the largest rate that each condition bears."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from .cells import CANDIDATES, LOSS, MEASURED, early_statistics, learned_means, read_cells
from .run import Cell, read_groups

LEVEL = 0.05
GRID = [0.1875e-3 * 2**i for i in range(9)]  # 0.19e-3 to 48e-3; a rate's place is its index
LIMIT_GROUPS = ("selection", "warmup", "six", "deep", "deep_pre")  # whose limits a test or a rule uses
CHOOSING = ("selection", "gpt_selection")  # whose best rates are used
CONDITION = ["family", "layers", "order", "warmup"]
PLACEMENTS = ("pre", "post", "b2t")
ROUNDING = 1 / 12  # variance of a number known within 1, here one step of log2 rate


def study_cells(records: Iterable[dict[str, Any]], study: str = "second") -> pd.DataFrame:
    """The cells of a study but the first, one row each: group, the fields of `Cell`, the columns of `read_outcomes`.

    Args:
        records: of all cells.
    """
    planned = [{"group": group, "id": cell.name} | vars(cell) for group, cell in read_groups(study)]
    cells = pd.DataFrame(planned).astype({"lr": float})
    return cells.merge(read_outcomes(records), on="id")


def read_outcomes(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """What records of the second study measured, one row each.

    Returns:
        id, `MEASURED`, cpu (type), and the columns of `early_statistics`.
    """
    records = list(records)
    found = read_cells(records).reindex(columns=MEASURED)
    found["id"] = [Cell(**record["config"]["cell"]).name for record in records]
    found["cpu"] = [record["environment"]["cpu"] for record in records]
    early = pd.DataFrame([early_statistics(record["config"]) for record in records], index=found.index)
    return pd.concat([found, early.reindex(columns=[*CANDIDATES, LOSS])], axis=1)


def place(lr: float) -> int:
    """The place of a rate on the grid."""
    return round(math.log2(lr / GRID[0]))


def rate(at: int) -> float:
    """The rate at a place; -1, of a seed that learned at none, is one step below the grid."""
    return GRID[0] * 2.0**at


def read_limits(cells: pd.DataFrame) -> pd.DataFrame:
    """The limit of every condition of `LIMIT_GROUPS` and `CHOOSING`.

    Args:
        cells: result of `study_cells`.

    Returns:
        `CONDITION`; seeds, the places of the seeds' limits by seed; limit, the lower one; best, the place of the best
        rate or None; lowest and highest, of the list.
    """
    rows = []
    for condition, some in cells[cells["group"].isin([*LIMIT_GROUPS, *CHOOSING])].groupby(CONDITION):
        lowest, highest = place(some["lr"].min()), place(some["lr"].max())
        # Rates are a factor of two apart: a seed's limit is as many steps above the lowest as rates in a row learned.
        seeds = {}
        for seed, states in some.sort_values("lr").groupby("seed")["state"]:
            seeds[int(seed)] = lowest - 1 + int(states.eq("learned").astype(int).cummin().sum())
        means = learned_means(some) if some["group"].isin(CHOOSING).any() else pd.Series()
        row = dict(zip(CONDITION, condition, strict=True)) | {"seeds": seeds, "limit": min(seeds.values())}
        row |= {"best": None if means.empty else place(means.idxmin()), "lowest": lowest, "highest": highest}
        rows.append(row)
    return pd.DataFrame(rows)


def observations(limits: pd.DataFrame, order: str) -> pd.DataFrame:
    """Limits of a placement at a warm-up of 100, per seed and depth: layers, seed, place."""
    some = limits[(limits["order"] == order) & (limits["warmup"] == 100) & (limits["family"] == "bert")]
    rows = [(row.layers, seed, at) for row in some.itertuples() for seed, at in row.seeds.items()]
    return pd.DataFrame(rows, columns=["layers", "seed", "place"])


def exponent(rows: pd.DataFrame) -> dict[str, float]:
    """k in depth^-k with its 95 % interval, and its extremes with the deepest limits one step higher and lower.

    The residual variance is at least `ROUNDING`: limits that lie on a line by chance are still rounded.
    """
    slope, squares, spread = _fit(rows["layers"], rows["place"])
    degrees = len(rows) - 2
    half = stats.t.ppf(1 - LEVEL / 2, degrees) * (max(squares / degrees, ROUNDING) / spread) ** 0.5
    deepest = rows["layers"] == rows["layers"].max()
    moved = [0.0 - _fit(rows["layers"], rows["place"] + step * deepest)[0] for step in (1, -1)]
    found = {"k": 0.0 - slope, "low": -slope - half, "high": -slope + half, "n": len(rows)}
    return found | {"k_deepest_higher": moved[0], "k_deepest_lower": moved[1]}


def slope_test(post: pd.DataFrame, pre: pd.DataFrame) -> dict[str, float]:
    """Test 7: the slope of post-norm minus pre-norm's (`effect`), with its 95 % interval and the one-sided p.

    The two lines have one residual variance, at least `ROUNDING`. `p_unfavourable` has the deepest limit of post-norm
    one step higher and that of pre-norm one step lower.
    """

    def test(shift: int) -> dict[str, float]:
        moved = [
            rows["place"] + sign * shift * (rows["layers"] == rows["layers"].max())
            for rows, sign in ((post, 1), (pre, -1))
        ]
        (steep, squares, spread), (flat, others, width) = (
            _fit(rows["layers"], y) for rows, y in zip((post, pre), moved, strict=True)
        )
        degrees = len(post) + len(pre) - 4
        error = (max((squares + others) / degrees, ROUNDING) * (1 / spread + 1 / width)) ** 0.5
        half = stats.t.ppf(1 - LEVEL / 2, degrees) * error
        effect = steep - flat
        p = stats.t.sf(-effect / error, degrees)
        return {"effect": effect, "low": effect - half, "high": effect + half, "p": p}

    return test(0) | {"n": len(post) + len(pre), "p_unfavourable": test(1)["p"]}


def _fit(layers: Sequence[int], places: Sequence[int]) -> tuple[float, float, float]:
    """Slope of log2 limit on log2 depth, the squared residuals, and the squared spread of log2 depth."""
    x, y = np.log2(np.asarray(layers, float)), np.asarray(places, float)
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    return slope, float(((y - slope * x) ** 2).sum()), spread


def describe_limits(limits: pd.DataFrame) -> dict[str, Any]:
    """For the record: the limits of BERT and the chosen rates, as learning rates, and each placement's `exponent`."""
    fits = {order: observations(limits, order) for order in PLACEMENTS}
    return {
        "limits": [_limit(row) for row in limits[limits["family"] == "bert"].to_dict("records")],
        "rates": [
            {key: row[key] for key in CONDITION} | {"lr": rate(row["best"])}
            for row in limits[limits["best"].notna()].to_dict("records")
        ],
        "exponents": {
            order: exponent(rows) | {"layers": sorted({int(n) for n in rows["layers"]})} for order, rows in fits.items()
        },
    }


def _limit(row: dict[str, Any]) -> dict[str, Any]:
    """A limit in rates, and the rates that were tried."""
    found = {key: row[key] for key in CONDITION[1:]} | {"limit": rate(row["limit"])}
    found["seeds"] = {str(seed): rate(at) for seed, at in row["seeds"].items()}
    return found | {"lowest": rate(row["lowest"]), "highest": rate(row["highest"])}
