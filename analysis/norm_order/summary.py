"""Summary of the first norm-order study: differences with confidence intervals, counts of outcomes, and the record.

Intervals use Student's t on differences paired by seed. They are given only where all runs of a comparison learned;
otherwise only the outcomes are counted.
"""

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
from scipy import stats

from analysis.report.records import ONE_THREAD
from lmscale.results import new_record

from .cells import ARM, DIVERGED_ABOVE, STATES, STUCK_WITHIN, at_chosen_rates
from .run_folder import NATS

FACTORIAL = 12  # layers at which all learning rates were run
REFERENCES = ("scored_entropy", "context_free_loss")  # see `run_folder.reference_losses`


def difference(
    cells: pd.DataFrame, of: str, first: Any, second: Any, loss: str = "train_loss"
) -> tuple[float, float, int]:
    """Difference in loss between two values of a column, `second` - `first`, paired by seed.

    Returns:
        mean and half width of its 95 % interval (Student's t; nan for one pair), both nan if a run did not learn;
        number of pairs.
    """
    by_seed = cells.pivot(index="seed", columns=of, values=loss)
    pairs = (by_seed[second] - by_seed[first]).dropna()
    if (cells["state"] != "learned").any():
        return math.nan, math.nan, len(pairs)
    return pairs.mean(), float(stats.t.ppf(0.975, len(pairs) - 1) * pairs.sem()), len(pairs)


def start_differences(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """Loss with unscaled minus loss with scaled initialization, per norm order.

    Returns:
        layers, order, lr (text: `chosen`; at the depth of the factorial also each rate), difference, half_width.
    """
    at_depth = cells[cells["layers"] == factorial]
    chosen = at_chosen_rates(cells, cells, factorial).groupby(["layers", "order"])
    groups = [(layers, order, "chosen", group) for (layers, order), group in chosen]
    groups += [(factorial, order, f"{lr:g}", g) for (order, lr), g in at_depth.groupby(["order", "lr"])]
    rows = []
    for layers, order, lr, group in groups:
        if group["scaled"].nunique() == 2:
            mean, half_width, _ = difference(group, "scaled", True, False)
            rows.append({"layers": layers, "order": order, "lr": lr, "difference": mean, "half_width": half_width})
    return pd.DataFrame(rows)


def order_differences(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """Compare post-norm with pre-norm per depth and initialization, each at its chosen learning rate.

    Returns:
        layers, scaled; pre and post (mean training losses), lr_pre and lr_post, state_pre and state_post (outcomes as
        text); difference and half_width, paired by seed; validation_difference and validation_half_width; seeds, the
        number of pairs. Means and differences are nan if a run did not learn, because its final loss is not comparable.
    """
    rows = []
    for (layers, scaled), group in at_chosen_rates(cells, cells, factorial).groupby(["layers", "scaled"]):
        row: dict[str, Any] = {"layers": layers, "scaled": scaled}
        for order in ("pre", "post"):
            side = group[group["order"] == order]
            row |= {order: math.nan if (side["state"] != "learned").any() else side["train_loss"].mean()}
            row |= {f"lr_{order}": side["lr"].iloc[0], f"state_{order}": count_states(side["state"])}
        row |= dict(zip(("difference", "half_width", "seeds"), difference(group, "order", "pre", "post"), strict=True))
        seen = difference(group, "order", "pre", "post", "validation_loss")
        row |= dict(zip(("validation_difference", "validation_half_width"), seen[:2], strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def count_states(states: Iterable[str]) -> str:
    """Outcomes as text: `3 learned`, or `1 learned, 2 diverged`."""
    states = list(states)
    return ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)


def summarize(cells: pd.DataFrame, factorial: int = FACTORIAL) -> dict[str, Any]:
    """Build the record of the study.

    Args:
        factorial: depth at which all learning rates were run.
    """
    metrics: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float, unit: str = NATS) -> None:
        if not math.isnan(value):  # no mean if a run did not learn; no interval for a single seed
            metrics[name] = {"value": value, "unit": unit}

    for row in order_differences(cells, factorial).to_dict("records"):
        name = f"{row['layers']}_layers/{_start(row['scaled'])}"
        for key in ("pre", "post", "difference", "half_width", "validation_difference", "validation_half_width"):
            add(f"{name}/{key}", row[key])
        for key, unit in (("lr_pre", "1"), ("lr_post", "1"), ("seeds", "pairs")):
            add(f"{name}/{key}", row[key], unit)
    for row in start_differences(cells, factorial).to_dict("records"):
        rate = "" if row["lr"] == "chosen" else f"/lr_{row['lr']}"
        name = f"{row['layers']}_layers/{row['order']}{rate}/unscaled_minus_scaled"
        add(name, row["difference"])
        add(f"{name}_half_width", row["half_width"])
    for (layers, order, scaled), row in endings(at_chosen_rates(cells, cells, factorial)).iterrows():
        for state, count in row.items():
            add(f"{layers}_layers/{_start(scaled)}/{order}/{state}", int(count), "cells at the chosen rate")
    for order, rows in endings(cells).groupby("order"):
        for state, count in rows.sum().items():
            add(f"{order}/{state}", int(count), "cells in all")
    for name in REFERENCES:
        add(name, cells[name].dropna().iloc[0])
    add("cpu_time", cells["cpu_time"].sum(), "s")
    rules = {"diverged_above": DIVERGED_ABOVE, "stuck_within": STUCK_WITHIN, "factorial": factorial}
    seeds = sorted(int(seed) for seed in cells["seed"].unique())
    return new_record("norm_order", "scaled_down", rules | {"seeds": seeds}, seeds[0], metrics, **ONE_THREAD)


def endings(cells: pd.DataFrame) -> pd.DataFrame:
    """Count the cells per outcome (`STATES`), and the unstable ones, by depth and arm."""
    rows = pd.concat([pd.get_dummies(cells["state"]).reindex(columns=list(STATES), fill_value=0), cells], axis=1)
    return rows.groupby(["layers", *ARM])[[*STATES, "unstable"]].sum().astype(int)


def _start(scaled: bool) -> str:
    return "scaled" if scaled else "unscaled"
