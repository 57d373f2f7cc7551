"""The norm-order study: its cells as data frames, the learning rates it chooses, and what the cells show together.

Words used here: an *arm* is a norm order with a way to start the weights before a residual (`scaled` by 1/sqrt(2 L), or
not); a *cell* is one run of an arm at a depth, a learning rate and a seed.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pandas as pd

from ..results import new_record

NATS = "nats/masked token"
# A cell has diverged where it had no finite gradient, or ends this far (nats) above its own lowest mean of 25 steps. It
# is stuck where it ends less than this below the least loss that is possible without a look at other tokens. Whatever
# its end, it was unstable where such a mean came DIVERGED_ABOVE over the lowest before it.
DIVERGED_ABOVE, STUCK_WITHIN = 0.25, 0.1
STATES = ("learned", "stuck", "diverged")
ARM = ["order", "scaled"]
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # 97.5 % quantile by degrees of freedom


def read_cells(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row a cell of `analysis/norm_order.py`.

    Returns:
        layers, order, scaled, lr, seed; train_loss (mean of the last 50 steps), validation_loss, lowest_loss and
        context_free_loss in nats a masked token; steps, cpu_time (s); state, one of `STATES`; unstable, bool.
    """
    rows = []
    for record in records:
        metrics = {name: entry["value"] for name, entry in record["metrics"].items()}
        rows.append(record["config"]["cell"] | metrics | {"unstable": _was_unstable(record["config"]["curve"])})
    cells = pd.DataFrame(rows)
    if len(cells):
        cells["lr"] = cells["lr"].astype(float)
        cells["state"] = [_state(row) for row in cells.to_dict("records")]
    return cells


def _state(cell: dict[str, Any]) -> str:
    if cell["non_finite"] or not cell["train_loss"] <= cell["lowest_loss"] + DIVERGED_ABOVE:
        return "diverged"
    return "stuck" if cell["train_loss"] > cell["context_free_loss"] - STUCK_WITHIN else "learned"


def _was_unstable(curve: Sequence[float]) -> bool:
    return any(loss > lowest + DIVERGED_ABOVE for loss, lowest in zip(curve, accumulate(curve, min), strict=True))


def read_curves(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Training loss of every cell: layers, order, scaled, lr, seed, step (the last of a window), loss in nats."""
    rows = []
    for record in records:
        config = record["config"]
        cell = config["cell"] | {"lr": float(config["cell"]["lr"])}
        rows += [cell | {"step": (i + 1) * config["window"], "loss": loss} for i, loss in enumerate(config["curve"])]
    return pd.DataFrame(rows)


def read_gradient_norms(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Gradient norm of every layer, before clipping: layers, order, scaled, lr, seed, step, layer (from 0), norm."""
    rows = []
    for record in records:
        config = record["config"]
        cell = config["cell"] | {"lr": float(config["cell"]["lr"])}
        for step, norms in config["gradient_norms"].items():
            layers = {int(part[6:]): norm for part, norm in norms.items() if part.startswith("layer_")}
            rows += [cell | {"step": int(step), "layer": layer, "norm": norm} for layer, norm in layers.items()]
    return pd.DataFrame(rows)


def choose_rates(cells: pd.DataFrame, layers: int) -> dict[tuple[str, bool], float]:
    """By arm the learning rate of the lowest mean training loss over the seeds; a rate at which a cell diverged only
    where all have one."""
    at_depth = cells[cells["layers"] == layers] if len(cells) else cells
    chosen: dict[tuple[str, bool], float] = {}
    for arm, group in at_depth.groupby(ARM) if len(at_depth) else ():
        by_rate = group.groupby("lr").agg(loss=("train_loss", "mean"), bad=("state", lambda s: (s == "diverged").any()))
        chosen[arm] = float(by_rate.sort_values(["bad", "loss"]).index[0])
    return chosen


def chosen_cells(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """The cells at the learning rate that was chosen for their arm."""
    rates = choose_rates(cells, factorial)
    return cells[[rates.get((row.order, row.scaled)) == row.lr for row in cells.itertuples()]]


def retried_cells(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """The cells at another depth and another rate than the one chosen for their arm: where the chosen one failed."""
    rates = choose_rates(cells, factorial)
    others = cells[cells["layers"] != factorial]
    return others[[rates.get((row.order, row.scaled)) != row.lr for row in others.itertuples()]]


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half width of its 95 % interval by Student's t; nan where there is one value alone."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return mean, math.nan
    return mean, STUDENT_T[count - 1] * statistics.stdev(values) / count**0.5


def difference(cells: pd.DataFrame, of: str, first: Any, second: Any) -> tuple[float, float, int]:
    """`second` minus `first` of a column's values in training loss, paired by seed: mean, half width, pairs."""
    by_seed = cells.pivot(index="seed", columns=of, values="train_loss")
    pairs = (by_seed[second] - by_seed[first]).dropna()
    return (*mean_and_interval(list(pairs)), len(pairs))


def order_differences(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """Post- against pre-norm at every depth and start, each at the learning rate chosen for it.

    Returns:
        as `compare_orders`, with layers and scaled.
    """
    return compare_orders(chosen_cells(cells, factorial), ["layers", "scaled"])


def equal_rate_differences(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """Post- against pre-norm at the depth that has every rate, each rate by itself.

    Returns:
        as `compare_orders`, with layers, scaled and lr.
    """
    return compare_orders(cells[cells["layers"] == factorial], ["layers", "scaled", "lr"])


def compare_orders(cells: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Post- against pre-norm, paired by seed, in every group of cells that has both.

    Returns:
        the columns `by`; pre, post (mean training loss), lr_pre, lr_post, difference, half_width, seeds, and how the
        cells of each order ended, as text. Where a cell diverged there is no end to take a mean of: nan.
    """
    rows = []
    for key, group in cells.groupby(by):
        sides = {order: group[group["order"] == order] for order in ("pre", "post")}
        if any(side.empty for side in sides.values()):
            continue
        mean, half_width, seeds = difference(group, "order", "pre", "post")
        if (group["state"] == "diverged").any():
            mean = half_width = math.nan
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        for order, side in sides.items():
            diverged = (side["state"] == "diverged").any()
            row |= {order: math.nan if diverged else side["train_loss"].mean(), f"lr_{order}": side["lr"].iloc[0]}
            row[f"state_{order}"] = count_states(side["state"])
        rows.append(row | {"difference": mean, "half_width": half_width, "seeds": seeds})
    return pd.DataFrame(rows)


def count_states(states: Iterable[str]) -> str:
    """`3 learned`, or `1 learned, 2 diverged`."""
    states = list(states)
    return ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)


def summarize(cells: pd.DataFrame, factorial: int) -> dict[str, Any]:
    """The record of the study.

    Args:
        factorial: the depth at which all learning rates were run.

    Raises:
        ValueError: a cell is missing of those at `factorial` layers, both orders and starts at every rate and seed.
    """
    at_depth = cells[cells["layers"] == factorial] if len(cells) else cells
    values = {key: at_depth[key].nunique() if len(at_depth) else 0 for key in (*ARM, "lr", "seed")}
    if values["order"] * values["scaled"] < 4 or len(at_depth) != math.prod(values.values()):
        raise ValueError(f"the study must have all cells at {factorial} layers, but some are missing")
    metrics = {}
    for row in order_differences(cells, factorial).to_dict("records"):
        name = f"{row['layers']}_layers/{'scaled' if row['scaled'] else 'unscaled'}"
        for key in ("pre", "post", "difference", "half_width"):
            if not math.isnan(row[key]):  # of diverged runs there is none, of one seed no width
                metrics[f"{name}/{key}"] = {"value": row[key], "unit": NATS}
        metrics[f"{name}/lr_pre"] = {"value": row["lr_pre"], "unit": "1"}
        metrics[f"{name}/lr_post"] = {"value": row["lr_post"], "unit": "1"}
        metrics[f"{name}/seeds"] = {"value": row["seeds"], "unit": "pairs"}
    for row in equal_rate_differences(cells, factorial).to_dict("records"):
        name = f"{factorial}_layers/{'scaled' if row['scaled'] else 'unscaled'}/lr_{row['lr']:g}"
        if not math.isnan(row["difference"]):
            metrics[f"{name}/difference"] = {"value": row["difference"], "unit": NATS}
            metrics[f"{name}/difference_half_width"] = {"value": row["half_width"], "unit": NATS}
    for (layers, order), group in chosen_cells(cells, factorial).groupby(["layers", "order"]):
        for state in STATES:
            count = int((group["state"] == state).sum())
            metrics[f"{layers}_layers/{order}/{state}"] = {"value": count, "unit": "cells at the chosen rates"}
        if group["scaled"].nunique() == 2 and not (group["state"] == "diverged").any():
            mean, half_width, _ = difference(group, "scaled", True, False)
            metrics[f"{layers}_layers/{order}/unscaled_minus_scaled"] = {"value": mean, "unit": NATS}
            if not math.isnan(half_width):
                name = f"{layers}_layers/{order}/unscaled_minus_scaled_half_width"
                metrics[name] = {"value": half_width, "unit": NATS}
    for (order, scaled, lr), group in at_depth.groupby([*ARM, "lr"]):
        name = f"{factorial}_layers/{order}_{'scaled' if scaled else 'unscaled'}/lr_{lr:g}"
        mean, half_width = mean_and_interval(list(group["train_loss"]))
        metrics[f"{name}/loss"] = {"value": mean, "unit": NATS}
        metrics[f"{name}/half_width"] = {"value": half_width, "unit": NATS}
    for cell in retried_cells(cells, factorial).itertuples():
        name = f"{cell.layers}_layers/{cell.order}_{'scaled' if cell.scaled else 'unscaled'}/lr_{cell.lr:g}"
        metrics[f"{name}/seed_{cell.seed}/loss"] = {"value": cell.train_loss, "unit": NATS}
    for order, group in cells.groupby("order"):
        for state in STATES:
            metrics[f"{order}/{state}"] = {"value": int((group["state"] == state).sum()), "unit": "cells in all"}
        metrics[f"{order}/unstable"] = {"value": int(group["unstable"].sum()), "unit": "cells in all"}
    metrics["context_free_loss"] = {"value": cells["context_free_loss"].dropna().iloc[0], "unit": NATS}
    metrics["cpu_time"] = {"value": cells["cpu_time"].sum(), "unit": "s"}
    rules = {"diverged_above": DIVERGED_ABOVE, "stuck_within": STUCK_WITHIN, "factorial": factorial}
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    seeds = sorted(int(seed) for seed in cells["seed"].unique())
    return new_record(
        "norm_order", "scaled_down", rules | {"seeds": seeds}, seeds[0], metrics, device="cpu", layout=layout
    )


def endings(cells: pd.DataFrame) -> pd.DataFrame:
    """How many cells ended in each of `STATES`, and how many were unstable on the way, by depth and arm."""
    rows = pd.concat([pd.get_dummies(cells["state"]).reindex(columns=list(STATES), fill_value=0), cells], axis=1)
    return rows.groupby(["layers", *ARM])[[*STATES, "unstable"]].sum().astype(int)


def order_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`order_differences` or `equal_rate_differences` as a table for reading."""
    return pd.DataFrame(
        {
            "layers": rows["layers"],
            "start before residuals": ["scaled" if scaled else "not scaled" for scaled in rows["scaled"]],
            "pre-norm (lr)": [_loss_and_rate(r.pre, r.lr_pre) for r in rows.itertuples()],
            "post-norm (lr)": [_loss_and_rate(r.post, r.lr_post) for r in rows.itertuples()],
            "post - pre, 95 %": [_interval(r.difference, r.half_width) for r in rows.itertuples()],
            "unit": NATS,
            "pre-norm runs": rows["state_pre"],
            "post-norm runs": rows["state_post"],
            "evidence": "scaled down",
        }
    )


def _loss_and_rate(loss: float, lr: float) -> str:
    return ("diverged" if math.isnan(loss) else f"{loss:.3f}") + f" ({lr:g})"


def _interval(mean: float, half_width: float) -> str:
    if math.isnan(mean):
        return ""
    return f"{mean:+.3f}" + (" (one seed)" if math.isnan(half_width) else f" +- {half_width:.3f}")
