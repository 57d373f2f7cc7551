"""Rate limits of the second study (plan.md), the cells that the grid's rule adds, and fits of limit on depth."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from .cells import learned_means
from .significance import LEVEL, student_quantile, student_tail

GRID = [0.1875e-3 * 2**i for i in range(9)]  # 0.19e-3 to 48e-3; a rate's place is its index
LIMIT_GROUPS = ("selection", "warmup", "six", "deep", "deep_pre")  # whose limits a test or a rule uses
CHOOSING = ("selection", "gpt_selection")  # whose best rates are used
CONDITION = ["family", "layers", "order", "warmup"]
ROUNDING = 1 / 12  # variance of a number known within 1, here one step of log2 rate


def place(lr: float) -> int:
    """The place of a rate on the grid."""
    return round(math.log2(lr / GRID[0]))


def rate(at: int) -> float:
    """The rate at a place; -1, of a seed that learned at none, is one step below the grid."""
    return GRID[0] * 2.0**at


def read_limits(cells: pd.DataFrame) -> pd.DataFrame:
    """The limit of every condition of `LIMIT_GROUPS` and `CHOOSING` whose cells have all run.

    Args:
        cells: result of `read_study`.

    Returns:
        `CONDITION`; group of its first cell; seeds, the places of the seeds' limits by seed; limit, the lower one;
        best, the place of the best rate or None; lowest and highest, of the list; added, the places of the rates that
        the grid's rule adds.
    """
    rows = []
    for condition, some in cells[cells["group"].isin([*LIMIT_GROUPS, *CHOOSING])].groupby(CONDITION):
        if some["state"].isna().any():
            continue
        lowest, highest = place(some["lr"].min()), place(some["lr"].max())
        # Rates are a factor of two apart: a seed's limit is as many steps above the lowest as rates in a row learned.
        learned = {
            seed: each.sort_values("lr")["state"].eq("learned").astype(int) for seed, each in some.groupby("seed")
        }
        seeds = {int(seed): lowest - 1 + int(each.cummin().sum()) for seed, each in learned.items()}
        best = _best(some) if some["group"].isin(CHOOSING).any() else None
        found = list(seeds.values()) if some["group"].isin(LIMIT_GROUPS).any() else []
        # A limit at the lowest rate is known, because the next rate failed; no rate below it is needed.
        lower = best == lowest or min(found, default=lowest) < lowest or (best is None and not found)
        added = [lowest - 1] * lower + [highest + 1] * (highest in (*found, best))
        row = dict(zip(CONDITION, condition, strict=True)) | {"group": some["group"].iloc[0]}
        row |= {"seeds": seeds, "limit": min(seeds.values()), "best": best}
        rows.append(row | {"lowest": lowest, "highest": highest, "added": [a for a in added if 0 <= a < len(GRID)]})
    columns = [*CONDITION, "group", "seeds", "limit", "best", "lowest", "highest", "added"]
    return pd.DataFrame(rows, columns=columns)


def _best(cells: pd.DataFrame) -> int | None:
    """The place of the rate with the lowest mean loss, of those at which all seeds learned."""
    means = learned_means(cells)
    return None if means.empty else place(means.idxmin())


def cells_to_add(limits: pd.DataFrame) -> Iterator[str]:
    """The groups that the grid's rule adds, as text for `cells.yaml`: each goes after the group of its name."""
    for row in limits.itertuples():
        lists = {"layers": row.layers, "order": row.order}
        usual = {"warmup": 100, "family": "bert"}
        lists |= {key: getattr(row, key) for key, value in usual.items() if getattr(row, key) != value}
        for at in row.added:
            found = lists | {"lr": f"{rate(at) * 1e3:g}e-3", "seed": ", ".join(map(str, row.seeds))}
            text = ", ".join(f"{key}: [{value}]" for key, value in found.items())
            yield f"  - name: {row.group}\n    cells: {{{text}}}"


def observations(limits: pd.DataFrame, order: str) -> pd.DataFrame:
    """Limits of a placement at a warm-up of 100, per seed and depth: layers, seed, place; without those to extend."""
    final = limits[limits["added"].map(len) == 0]
    final = final[(final["order"] == order) & (final["warmup"] == 100) & (final["family"] == "bert")]
    rows = [(row.layers, seed, at) for row in final.itertuples() for seed, at in row.seeds.items()]
    return pd.DataFrame(rows, columns=["layers", "seed", "place"])


def exponent(rows: pd.DataFrame) -> dict[str, float]:
    """k in depth^-k with its 95 % interval, and its extremes with the deepest limits one step higher and lower.

    The residual variance is at least `ROUNDING`: limits that lie on a line by chance are still rounded.
    """
    slope, squares, spread = _fit(rows["layers"], rows["place"])
    degrees = len(rows) - 2
    half = student_quantile(1 - LEVEL / 2, degrees) * (max(squares / degrees, ROUNDING) / spread) ** 0.5
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
        half = student_quantile(1 - LEVEL / 2, degrees) * error
        effect = steep - flat
        p = student_tail(-effect / error, degrees)
        return {"effect": effect, "low": effect - half, "high": effect + half, "p": p}

    return test(0) | {"n": len(post) + len(pre), "p_unfavourable": test(1)["p"]}


def _fit(layers: Sequence[int], places: Sequence[int]) -> tuple[float, float, float]:
    """Slope of log2 limit on log2 depth, the squared residuals, and the squared spread of log2 depth."""
    x, y = np.log2(np.asarray(layers, float)), np.asarray(places, float)
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    return slope, float(((y - slope * x) ** 2).sum()), spread
