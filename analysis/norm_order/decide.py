"""Evaluate the norm-order studies whose cells all have a record.

    python analysis/norm_order/decide.py                       # the committed ones: writes their summaries again
    python analysis/norm_order/decide.py --records FOLDER      # those of `run.py --records FOLDER`

`norm_order.json` has the first study's differences with their intervals (`summary.py`). `norm_order_study.json` has
the outcome of the second by its plan (plan.md): the twelve tests with Holm's correction, rate limits, chosen rates,
recovery, the mechanism and what is refuted. `make tables` and `make figures` show both.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
import pandas as pd
from scipy import stats

from analysis.norm_order.cells import CANDIDATES, LOSS, MEASURED, early_statistics, learned_means, read_cells
from analysis.norm_order.run import FILES, RECORDS, Cell, read_groups
from analysis.norm_order.run_folder import NATS, NATS_PER_TOKEN
from analysis.norm_order.summary import summarize
from analysis.report.records import read_lines
from lmscale.results import new_record, write_record

LEVEL = 0.05
GRID = [0.1875e-3 * 2**i for i in range(9)]  # 0.19e-3 to 48e-3; a rate's place is its index
LIMIT_GROUPS = ("selection", "warmup", "six", "deep", "deep_pre")  # whose limits a test or a rule uses
CHOOSING = ("selection", "gpt_selection")  # whose best rates are used
CONDITION = ["family", "layers", "order", "warmup"]
ROUNDING = 1 / 12  # variance of a number known within 1, here one step of log2 rate
PLACEMENTS = ("pre", "post", "b2t")
ABOVE_POST = 0.03  # nats that B2T's mean loss may be above post-norm's
RULE_GROUPS = ("selection", "warmup", "six", "mechanism", "slow_start", "deep")
SETTING = ["layers", "lr", "warmup"]
PAIRS, SLOPE = "share of pairs", "log2 rate per log2 depth"
COMPARISONS = {  # test: group, layers, the placement expected to end lower, the other
    1: ("losses", 12, "post", "pre"),
    2: ("losses", 24, "post", "pre"),
    3: ("losses", 12, "b2t", "post"),
    4: ("losses", 24, "b2t", "post"),
    5: ("losses", 12, "b2t", "pre"),
    6: ("losses", 24, "b2t", "pre"),
    11: ("race", 12, "post", "pre"),
    12: ("gpt", 12, "post", "pre"),
}
TWO_SIDED = (3, 4)  # without an expected direction
HYPOTHESES = {
    1: "post-norm ends lower than pre-norm at 12 layers",
    2: "post-norm ends lower than pre-norm at 24 layers",
    3: "B2T and post-norm end at different losses at 12 layers",
    4: "B2T and post-norm end at different losses at 24 layers",
    5: "B2T ends lower than pre-norm at 12 layers",
    6: "B2T ends lower than pre-norm at 24 layers",
    7: "post-norm's rate limit falls faster with depth than pre-norm's",
    8: "a warm-up of 400 steps makes post-norm learn where it is stuck with 100",
    9: "the first 100 steps predict whether a post-norm run is stuck",
    10: "DeepNorm learns where post-norm is stuck",
    11: "post-norm ends lower than pre-norm on RACE at 12 layers",
    12: "post-norm ends lower than pre-norm for GPT at 12 layers",
}


def study_cells(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The cells of the second study, one row each: group, the fields of `Cell`, and the columns of `read_outcomes`.

    Args:
        records: of all cells.
    """
    planned = [{"group": group, "id": cell.name} | vars(cell) for group, cell in read_groups("second")]
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
        learned = {
            seed: each.sort_values("lr")["state"].eq("learned").astype(int) for seed, each in some.groupby("seed")
        }
        seeds = {int(seed): lowest - 1 + int(each.cummin().sum()) for seed, each in learned.items()}
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


@dataclass(frozen=True)
class Rule:
    """A cell is predicted to be stuck if its statistic is above the threshold, or, if not `above`, below it."""

    statistic: str
    threshold: float
    above: bool
    accuracy: float

    def predict(self, cells: pd.DataFrame) -> pd.Series:
        """True for the cells that it calls stuck."""
        return (cells[self.statistic] > self.threshold) == self.above


def fix_rule(cells: pd.DataFrame, statistics: Sequence[str]) -> Rule:
    """The rule with the best accuracy on these cells.

    Thresholds lie halfway between neighbouring values. Of equal rules the first is taken: by the order of the
    statistics, then the lower threshold, then `above`.
    """
    rules, stuck = [], cells["stuck"].to_numpy()
    for statistic in statistics:
        found, values = cells[statistic].to_numpy(), np.unique(cells[statistic])
        for threshold in (values[1:] + values[:-1]) / 2:
            for above in (True, False):
                right = ((found > threshold) == above) == stuck
                rules.append(Rule(statistic, float(threshold), above, float(right.mean())))
    return max(rules, key=lambda rule: rule.accuracy)  # the first of the best


def mechanism_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The post-norm cells of `RULE_GROUPS` that have statistics at step 100, sorted by ID, with `stuck` and `judges`.

    Counted from one, the even cells fix the rule and the odd ones judge it.
    """
    some = cells[cells["group"].isin(RULE_GROUPS) & (cells["order"] == "post")]
    some = some.dropna(subset=[*CANDIDATES, LOSS]).sort_values("id", ignore_index=True)
    return some.assign(stuck=some["state"] == "stuck", judges=some.index % 2 == 0)


def judge(cells: pd.DataFrame) -> dict[str, Any]:
    """Fix the rules on one half of `mechanism_cells` and judge them on the other: question 4 of the plan.

    Returns:
        the rule; accuracy on the second half with its Clopper-Pearson interval (low, high) and n; the confusion table;
        the accuracies of the majority baseline (the more frequent state of the first half) and of the rule on the loss;
        the exact one-sided McNemar p against the baseline, with the pairs gained and lost; the medians of
        `constant_share`, the mean of both sublayers, by state; and, added after the plan, the accuracy of what the
        first half's cells of the same depth, rate and warm-up mostly did (`condition_accuracy`).
    """
    first, second = cells[~cells["judges"]], cells[cells["judges"]]
    rule, loss_rule = fix_rule(first, CANDIDATES), fix_rule(first, [LOSS])
    stuck, predicted, majority = second["stuck"], rule.predict(second), bool(first["stuck"].mean() > 0.5)
    right, baseline = predicted == stuck, stuck == majority
    low, high = _interval_of_share(int(right.sum()), len(second))
    gained, lost = int((right & ~baseline).sum()), int((baseline & ~right).sum())
    share_stuck = first.groupby(SETTING)["stuck"].mean().rename("share_stuck")
    by_condition = second.join(share_stuck, on=SETTING)["share_stuck"].fillna(first["stuck"].mean()) > 0.5
    share = second[["constant_share/mlp", "constant_share/attention"]].mean(axis=1)
    names = {True: "stuck", False: "not stuck"}
    return {
        "rule": vars(rule),
        "loss_rule": vars(loss_rule),
        "n": len(second),
        "accuracy": float(right.mean()),
        "low": low,
        "high": high,
        "confusion": {
            f"{names[a]}, predicted {names[b]}": int(((stuck == a) & (predicted == b)).sum())
            for a, b in itertools.product((True, False), repeat=2)
        },
        "majority": names[majority],
        "majority_accuracy": float(baseline.mean()),
        "condition_accuracy": float((by_condition == stuck).mean()),
        "loss_accuracy": float((loss_rule.predict(second) == stuck).mean()),
        "gained": gained,
        "lost": lost,
        "p": _mcnemar(gained, lost),
        "constant_share": {state: float(values.median()) for state, values in share.groupby(second["state"])},
    }


def _interval_of_share(successes: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval."""
    found = stats.binomtest(successes, trials).proportion_ci(1 - LEVEL, "exact")
    return float(found.low), float(found.high)


def _mcnemar(gained: int, lost: int) -> float:
    """Exact one-sided p of so many pairs in which only the second, and in which only the first, succeeds."""
    return float(stats.binom.sf(gained - 1, gained + lost, 0.5))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order of the given ones; reject those below the level. Source: Holm 1979."""
    order = np.argsort(values, kind="stable")
    stepped = np.arange(len(values), 0, -1) * np.asarray(values)[order]
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(stepped.clip(max=1))
    return adjusted.tolist()


def run_tests(cells: pd.DataFrame, limits: pd.DataFrame, rule: dict[str, Any]) -> list[dict[str, Any]]:
    """The twelve tests in order, with Holm's correction.

    Args:
        cells, limits, rule: results of `study_cells`, `read_limits` and `judge`.

    Returns:
        per test: test, hypothesis, method, n, effect, low, high, unit, p, p_holm, decision, note. The decision is
        `not supported`, or `too few pairs` to reject the null hypothesis, if the test does not reject it; if it does
        `supported`, `the opposite is supported` or `within the grid's rounding`.
    """
    found = {test: compare_losses(cells, *arms) for test, arms in COMPARISONS.items()}
    found |= {7: compare_limits(limits), 9: _predicted(rule)}
    found |= {8: intervene(cells, "slow_start"), 10: intervene(cells, "rescaled")}
    adjusted = holm([found[test]["p"] for test in HYPOTHESES])
    rows = []
    for (test, hypothesis), p_holm in zip(HYPOTHESES.items(), adjusted, strict=True):
        result = found[test]
        expected = result.pop("expected") or test in TWO_SIDED
        decision = "not supported" if p_holm > LEVEL else "supported" if expected else "the opposite is supported"
        decision = result.pop("instead", {}).get(decision, decision)
        rows.append({"test": test, "hypothesis": hypothesis} | result | {"p_holm": p_holm, "decision": decision})
    return rows


def compare_losses(cells: pd.DataFrame, group: str, layers: int, first: str, second: str) -> dict[str, Any]:
    """Loss of the first placement minus the second's, paired by seed: a t test, or signs if a seed did not learn."""
    some = cells[(cells["group"] == group) & (cells["layers"] == layers) & cells["order"].isin([first, second])]
    by_seed = some.pivot(index="seed", columns="order", values=["state", "train_loss", "validation_loss", "cpu"])
    learned, losses = by_seed["state"] == "learned", by_seed["train_loss"].astype(float)
    note = ", ".join(f"{order} {learned[order].sum()} of {len(by_seed)} learned" for order in (first, second))
    if mixed := int((by_seed["cpu"][first] != by_seed["cpu"][second]).sum()):
        note += f"; {mixed} pairs of two CPU types"
    if learned.all(axis=None):
        test = stats.ttest_rel(losses[first], losses[second])
        low, high = test.confidence_interval(1 - LEVEL)
        effect = float((losses[first] - losses[second]).mean())
        note += f"; validation {(by_seed['validation_loss'][first] - by_seed['validation_loss'][second]).mean():+.3f}"
        result = {"method": "paired t", "n": len(by_seed), "unit": NATS_PER_TOKEN if group == "gpt" else NATS}
        result |= {"effect": effect, "low": float(low), "high": float(high), "p": float(test.pvalue)}
        return result | {"note": note, "expected": effect < 0}
    losses = losses.where(learned, float("inf"))
    lower, higher = int((losses[first] < losses[second]).sum()), int((losses[first] > losses[second]).sum())
    p = float(stats.binomtest(lower, lower + higher).pvalue)
    return {"method": "exact sign test", "note": note, "expected": lower > higher} | _of_pairs(lower, higher, p)


def compare_limits(limits: pd.DataFrame) -> dict[str, Any]:
    """Test 7.

    With equal slopes, rounding down to the grid leaves a difference of the limits that is one of two neighbouring
    steps at each depth. So an effect up to the largest slope of such a difference is within the grid's rounding.
    """
    post, pre = observations(limits, "post"), observations(limits, "pre")
    result, depths = slope_test(post, pre), sorted(set(post["layers"]))
    x = np.log2(depths) - np.mean(np.log2(depths))
    rounding = float(x.clip(0).sum() / (x @ x))
    at_end = sum(int((~rows["place"].between(0, len(GRID) - 2)).sum()) for rows in (post, pre))
    note = f"{', '.join(map(str, depths))} layers; {at_end} limits at an end of the grid; "
    note += f"p at the least favourable deepest limits {result.pop('p_unfavourable'):.2g}"
    note += f"; rounding to the grid can give {-rounding:.2g}"
    more = {"method": "one-sided t of slopes", "unit": SLOPE, "note": note, "expected": result["effect"] < 0}
    if result["effect"] >= -rounding - 1e-9:
        more["instead"] = {"supported": "within the grid's rounding"}
    return more | result


def intervene(cells: pd.DataFrame, group: str) -> dict[str, Any]:
    """Tests 8 and 10: pairs of equal depth and seed of which only the cell in `group`, or in `mechanism`, learned."""
    some = cells[cells["group"].isin(["mechanism", group])]
    states = some.pivot(index=["layers", "seed"], columns="group", values="state")
    learned, stuck = states == "learned", states["mechanism"] == "stuck"
    gained = int((stuck & learned[group]).sum())
    lost = int((learned["mechanism"] & ~learned[group]).sum())
    note = f"{stuck.sum()} of {len(states)} stuck in mechanism, {gained} of these learned in {group}"
    least = 0.5 ** int(stuck.sum())
    more = {"method": "exact one-sided McNemar", "expected": gained > lost}
    if least > LEVEL:
        more["instead"] = {"not supported": "too few pairs"}
        note += f"; p cannot be below {least:.2g}"
    return more | {"note": note} | _of_pairs(gained, lost, _mcnemar(gained, lost))


def _predicted(rule: dict[str, Any]) -> dict[str, Any]:
    note = f"accuracy {rule['accuracy']:.3f} [{rule['low']:.3f}, {rule['high']:.3f}] of {rule['n']} held-out runs, "
    note += f"majority {rule['majority_accuracy']:.3f}"
    result = _of_pairs(rule["gained"], rule["lost"], rule["p"])
    return {"method": "exact one-sided McNemar", "note": note, "expected": rule["gained"] > rule["lost"]} | result


def _of_pairs(first: int, second: int, p: float) -> dict[str, Any]:
    """Share of the pairs that differ in which the first does better, with its interval."""
    n = first + second
    low, high = _interval_of_share(first, n) if n else (None, None)
    return {"n": n, "effect": first / n if n else None, "low": low, "high": high, "unit": PAIRS, "p": p}


def recovery(cells: pd.DataFrame, limits: pd.DataFrame, tests: list[dict[str, Any]]) -> dict[str, bool]:
    """The conditions of question 3, and whether all of a depth hold.

    At 48 layers no loss is scored, so B2T has the condition on the limit alone, and only that rate has run. The
    condition on a longer warm-up is on the limit alone, and holds trivially where 100 steps meet it.
    """
    limit = limits[limits["family"] == "bert"].set_index(["layers", "order", "warmup"])["limit"]
    found: dict[str, bool] = {}
    for layers, test in ((12, 5), (24, 6)):
        conditions = {
            "ends lower than pre-norm": tests[test - 1]["decision"] == "supported",
            "loss near post-norm's": _near(cells, layers),
            "limit at least twice post-norm's": bool(limit[layers, "b2t", 100] > limit[layers, "post", 100]),
        }
        found |= {f"b2t, {layers} layers: {name}": value for name, value in conditions.items()}
        found[f"b2t, {layers} layers: recovers"] = all(conditions.values())
    b2t = cells[cells["group"] == "deep_b2t"]
    above = set(b2t["lr"].map(place)) == {limit[48, "post", 100] + 1}
    found["b2t, 48 layers: learns at twice post-norm's limit"] = above and bool((b2t["state"] == "learned").all())
    for layers in (12, 24):
        for warmup, name in ((400, "recovers"), (100, "100 steps do so too")):
            met = bool(limit[layers, "post", warmup] >= limit[layers, "pre", 100])
            found[f"warm-up of 400, {layers} layers: {name}"] = met
    return found


def _near(cells: pd.DataFrame, layers: int) -> bool:
    """Whether B2T's mean loss is at most `ABOVE_POST` over post-norm's, at the seeds at which post-norm learned."""
    some = cells[(cells["group"] == "losses") & (cells["layers"] == layers)].set_index("seed")
    post = some[(some["order"] == "post") & (some["state"] == "learned")]
    b2t = some[some["order"] == "b2t"].loc[post.index]
    over = b2t["train_loss"].mean() - post["train_loss"].mean()
    return bool((b2t["state"] == "learned").all() and over <= ABOVE_POST)


def refuted(
    cells: pd.DataFrame, tests: list[dict[str, Any]], recovered: dict[str, bool], rule: dict[str, Any]
) -> dict[str, bool]:
    """What the plan says would refute us, by question."""

    def opposite(test: int) -> bool:
        """Whether post-norm ends higher, with all seeds learned."""
        row = tests[test - 1]
        return row["decision"] == "the opposite is supported" and row["method"] == "paired t"

    share = rule["constant_share"]
    return {
        "question 1": tests[6]["decision"] != "supported",
        "question 2": opposite(1) or opposite(2),
        "question 3": bool(stuck_b2t(cells)) or not recovered["b2t, 24 layers: recovers"],
        "question 4": tests[8]["decision"] != "supported"
        or rule["accuracy"] <= rule["loss_accuracy"]
        or share.get("stuck", 0.0) <= share.get("learned", 1.0),
        "question 5": opposite(11) or opposite(12),
    }


def stuck_b2t(cells: pd.DataFrame) -> list[str]:
    """IDs of B2T cells that are stuck where post-norm learned: same depth, rate, warm-up, seed and data."""
    keys = ["layers", "lr", "warmup", "seed", "family", "data"]
    post = cells[(cells["order"] == "post") & (cells["state"] == "learned")]
    stuck = cells[(cells["order"] == "b2t") & (cells["state"] == "stuck")]
    return sorted(stuck.merge(post[keys], on=keys)["id"])


def describe_repeats(cells: pd.DataFrame, repeats: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Metrics of cells repeated on another CPU type, which decide nothing.

    Numbers of a cell differ between CPU types by rounding, which training amplifies. Where the arms of a test ran on
    two types, the repeats give the effect on one.

    Args:
        cells, repeats: results of `study_cells` and `read_outcomes`.

    Returns:
        repeated/cells and repeated/other_states, counts; repeated/largest_difference and repeated/mean_difference,
        repeat minus record; repeated/test N/effect, low and high. Empty without repeats.
    """
    if repeats.empty:
        return {}
    swapped, again = cells.set_index("id"), repeats.set_index("id")
    first = swapped.loc[again.index]
    difference = again["train_loss"] - first["train_loss"]
    found = {
        "cells": (len(again), "runs"),
        "other_states": (int((again["state"] != first["state"]).sum()), "runs"),
        "largest_difference": (float(difference[difference.abs().idxmax()]), NATS),
        "mean_difference": (float(difference.mean()), NATS),
    }
    swapped.loc[again.index, [*MEASURED, "cpu"]] = again[[*MEASURED, "cpu"]]
    swapped = swapped.reset_index()
    for test, (group, layers, *orders) in COMPARISONS.items():
        some = swapped[(swapped["group"] == group) & (swapped["layers"] == layers) & swapped["order"].isin(orders)]
        if some["id"].isin(again.index).any() and some["cpu"].nunique() == 1:
            result = compare_losses(swapped, group, layers, *orders)
            found |= {f"test {test}/{key}": (result[key], result["unit"]) for key in ("effect", "low", "high")}
    return {f"repeated/{name}": {"value": value, "unit": unit} for name, (value, unit) in found.items()}


def decide(cells: pd.DataFrame, repeats: pd.DataFrame) -> dict[str, Any]:
    """The outcome, `config` and `metrics`, from the results of `study_cells` and `read_outcomes`."""
    limits, rule = read_limits(cells), judge(mechanism_cells(cells))
    tests = run_tests(cells, limits, rule)
    recovered = recovery(cells, limits, tests)
    fits = {order: observations(limits, order) for order in PLACEMENTS}
    config = {
        "groups": {group: len(some) for group, some in cells.groupby("group", sort=False)},
        "tests": tests,
        "limits": [_limit(row) for row in limits[limits["family"] == "bert"].to_dict("records")],
        "rates": [
            {key: row[key] for key in CONDITION} | {"lr": rate(row["best"])}
            for row in limits[limits["best"].notna()].to_dict("records")
        ],
        "exponents": {
            order: exponent(rows) | {"layers": sorted({int(n) for n in rows["layers"]})} for order, rows in fits.items()
        },
        "recovery": recovered,
        "stuck_b2t": stuck_b2t(cells),
        "mechanism": rule,
        "without_statistics": int(cells.loc[cells["group"].isin(RULE_GROUPS), LOSS].isna().sum()),
        "refuted": refuted(cells, tests, recovered, rule),
        "cpus": {str(cpu): int(count) for cpu, count in cells["cpu"].value_counts().sort_index().items()},
    }
    metrics = {"cells": {"value": len(cells), "unit": "runs"}}
    metrics["cpu_time"] = {"value": float(cells["cpu_time"].sum()), "unit": "s"}
    metrics |= describe_repeats(cells, repeats)
    metrics |= {
        f"test {test['test']}/{key}": {"value": test[key], "unit": test["unit"]}
        for test, key in itertools.product(tests, ("effect", "low", "high"))
        if test["effect"] is not None
    }
    return {"config": config, "metrics": metrics}


def _limit(row: dict[str, Any]) -> dict[str, Any]:
    """A limit in rates, and the rates that were tried."""
    found = {key: row[key] for key in CONDITION[1:]} | {"limit": rate(row["limit"])}
    found["seeds"] = {str(seed): rate(at) for seed, at in row["seeds"].items()}
    return found | {"lowest": rate(row["lowest"]), "highest": rate(row["highest"])}


def main() -> int:
    """Write the summaries and print the tests."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    options = parser.parse_args()
    summaries = {}
    for study, file in FILES.items():
        recorded, planned = read_lines(options.records / file), {cell.name for _, cell in read_groups(study)}
        if missing := planned - recorded.keys():
            print(f"{study} study: {len(missing)} of {len(planned)} cells have no record in {options.records / file}")
        elif study == "first":
            summaries["norm_order.json"] = summarize(read_cells(recorded.values()))
        else:
            cells = study_cells(recorded.values())
            outcome = decide(cells, read_outcomes(read_lines(options.records / "repeated.jsonl").values()))
            about = {"device": "cpu", "layout": {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}}
            about["seed"] = int(cells["seed"].iloc[0])
            summaries["norm_order_study.json"] = new_record("norm_order_study", "scaled_down", **outcome, **about)
            for row in outcome["config"]["tests"]:
                p = f"p {row['p']:.2g}, Holm {row['p_holm']:.2g}"
                print(f"{row['test']:>3} {row['hypothesis']}: {row['decision']}, {p}")
    # After all are built: a changed file would make the next one's commit `dirty`.
    for name, record in summaries.items():
        write_record(record, options.records / name)
        print(f"record: {options.records / name}")
    return 0 if summaries else 2


if __name__ == "__main__":
    sys.exit(main())
