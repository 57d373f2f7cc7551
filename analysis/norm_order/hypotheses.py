"""The twelve tests of the second norm-order study by its plan, and the rule that tells stuck runs early (test 9)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from .cells import CANDIDATES, LOSS
from .limits import GRID, LEVEL, observations, slope_test
from .run_folder import NATS, NATS_PER_TOKEN

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
