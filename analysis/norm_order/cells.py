"""The norm-order study: its cells as data frames, how each ended, and the learning rates that they choose.

Words used here: an *arm* is a norm order with a way to start the weights before a residual (`scaled` by 1/sqrt(2 L), or
not); a *cell* is one run of an arm at a depth, a learning rate and a seed.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pandas as pd

NATS = "nats/masked token"
# A cell has diverged where it had no finite gradient, or ends this far (nats) above its own lowest mean of 25 steps. It
# is stuck where it ends less than this below the least loss that is possible without a look at other places, or above
# it. Whatever its end, it was unstable where such a mean came DIVERGED_ABOVE over the lowest before it.
DIVERGED_ABOVE, STUCK_WITHIN = 0.25, 0.1
STATES = ("learned", "stuck", "diverged")
ARM = ["order", "scaled"]
CELL = ["layers", *ARM, "lr", "seed"]


def read_cells(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row per cell of `run.py`.

    Returns:
        layers, order, scaled, lr, seed; train_loss (mean of the last 50 steps), validation_loss, lowest_loss,
        scored_entropy and context_free_loss in nats per masked token; steps, cpu_time (s); state, one of `STATES`;
        unstable, bool.

    Raises:
        ValueError: two records are of the same cell.
    """
    rows = []
    for record in records:
        metrics = {name: entry["value"] for name, entry in record["metrics"].items()}
        rows.append(record["config"]["cell"] | metrics | {"unstable": _was_unstable(record["config"]["curve"])})
    cells = pd.DataFrame(rows)
    if len(cells):
        again = cells[cells.duplicated(CELL)]
        if len(again):
            raise ValueError(f"a cell must have one record, but {again.iloc[0][CELL].to_dict()} has two")
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


def at_chosen_rates(rows: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """Of rows with order, scaled and lr, those at the learning rate that `cells` chose for their arm."""
    rates = choose_rates(cells, factorial)
    return rows[[rates.get((row.order, row.scaled)) == row.lr for row in rows.itertuples()]]


def retried_cells(cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """The cells at another depth and another rate than the one chosen for their arm: where the chosen one failed."""
    chosen = at_chosen_rates(cells, cells, factorial)
    return cells[(cells["layers"] != factorial) & ~cells.index.isin(chosen.index)]
