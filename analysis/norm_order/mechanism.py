"""Question 4 of the second study (plan.md): one statistic of the first 100 steps that tells stuck runs from others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .run_folder import WINDOW
from .significance import clopper_pearson, mcnemar

RULE_GROUPS = ("selection", "warmup", "six", "mechanism", "slow_start", "deep")
STEP = 100
CANDIDATES = (
    "constant_share/mlp",
    "constant_share/attention",
    "attention_entropy/attention",
    "variance_ratio/mlp",
    "gradient_norm/mlp",
)
LOSS = "loss"
SETTING = ["layers", "lr", "warmup"]


def early_statistics(config: dict[str, Any]) -> dict[str, float]:
    """The candidates at step 100 and the mean loss of steps 76 to 100, from a record's configuration.

    Candidates are means over the layers; `gradient_norm/mlp` is the smallest over the largest of a layer. A run that
    ended before has none, nor has one with a number that is not finite there.
    """
    columns, window = config.get("statistics", {}).get(str(STEP)), STEP // WINDOW - 1
    if columns is None or len(config["curve"]) <= window or any(None in columns[name] for name in CANDIDATES):
        return {}
    found = {name: float(np.mean(columns[name])) for name in CANDIDATES[:-1]}
    norms = columns[CANDIDATES[-1]]
    return found | {CANDIDATES[-1]: min(norms) / max(norms), LOSS: config["curve"][window]}


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

    Those of `deep` are left out until all of them have run. Counted from one, the even cells fix the rule and the odd
    ones judge it.
    """
    some = cells[cells["group"].isin(RULE_GROUPS) & (cells["order"] == "post")]
    deep = some["group"] == "deep"
    some = some[some["state"].notna() & ~(deep & some[deep]["state"].isna().any())]
    some = some.dropna(subset=[*CANDIDATES, LOSS]).sort_values("id", ignore_index=True)
    return some.assign(stuck=some["state"] == "stuck", judges=some.index % 2 == 0)


def judge(cells: pd.DataFrame) -> dict[str, Any]:
    """Fix the rules on one half of `mechanism_cells` and judge them on the other.

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
    low, high = clopper_pearson(int(right.sum()), len(second))
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
            for a in (True, False)
            for b in (True, False)
        },
        "majority": names[majority],
        "majority_accuracy": float(baseline.mean()),
        "condition_accuracy": float((by_condition == stuck).mean()),
        "loss_accuracy": float((loss_rule.predict(second) == stuck).mean()),
        "gained": gained,
        "lost": lost,
        "p": mcnemar(gained, lost),
        "constant_share": {state: float(values.median()) for state, values in share.groupby(second["state"])},
    }
