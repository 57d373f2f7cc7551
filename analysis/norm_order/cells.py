"""The norm-order studies: their cells as data frames, the outcome of each, and the best learning rate per arm.

An *arm* is a norm order with an initialization of the residual layers (`scaled` by 1/sqrt(2 L), or not). A *cell* is
one run of an arm at one depth, learning rate and seed.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd

from .run_folder import WINDOW

# Thresholds in nats, for means over windows of 25 steps. A cell diverged if its gradient became non-finite or its final
# loss is more than DIVERGED_ABOVE over its lowest. It is stuck if its final loss is not at least STUCK_WITHIN below the
# lowest loss possible without context. It was unstable if a window was ever DIVERGED_ABOVE over the lowest before it.
DIVERGED_ABOVE, STUCK_WITHIN = 0.25, 0.1
STATES = ("learned", "stuck", "diverged")
ARM = ["order", "scaled"]
CELL = ["layers", *ARM, "lr", "seed"]
CONDITIONS = ["warmup", "family", "data", "precision"]  # which the cells of the second study have besides
MEASURED = ["state", "train_loss", "validation_loss", "cpu_time"]
STEP = 100  # of the statistics that may tell stuck runs from others
STATISTICS = {  # with their names in tables and figures
    "constant_share/mlp": "MLP constant share",
    "constant_share/attention": "Attention constant share",
    "attention_entropy/attention": "Attention entropy",
    "variance_ratio/mlp": "MLP variance ratio",
    "gradient_norm/mlp": "MLP gradient ratio",
}
CANDIDATES = tuple(STATISTICS)
LOSS = "loss"


def read_cells(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Read records of `run.py` into one row per cell.

    Returns:
        layers, order, scaled, lr, seed; train_loss (mean of the last 50 steps), validation_loss, lowest_loss,
        scored_entropy and context_free_loss in nats per masked token; steps, cpu_time (s); state, one of `STATES`;
        unstable, bool.

    Raises:
        ValueError: two records belong to the same cell.
    """
    rows = []
    for record in records:
        metrics = {name: entry["value"] for name, entry in record["metrics"].items()}
        rows.append(record["config"]["cell"] | metrics | {"unstable": _was_unstable(record["config"]["curve"])})
    cells = pd.DataFrame(rows)
    if len(cells):
        again = cells[cells.duplicated([*CELL, *cells.columns.intersection(CONDITIONS)])]
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


def read_curves(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Training loss of every cell: layers, order, scaled, lr, seed, step (middle of the window), mean loss in nats."""
    rows = []
    for record in records:
        config = record["config"]
        cell, window = config["cell"], config["window"]
        rows += [cell | {"step": (i + 0.5) * window + 0.5, "loss": loss} for i, loss in enumerate(config["curve"])]
    return pd.DataFrame(rows).astype({"lr": float})


def read_gradient_norms(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Gradient norm per layer before clipping: layers, order, scaled, lr, seed, step, layer (from 0), norm."""
    rows = []
    for record in records:
        for step, norms in record["config"]["gradient_norms"].items():
            layers = {int(part[6:]): norm for part, norm in norms.items() if part.startswith("layer_")}
            at = record["config"]["cell"] | {"step": int(step)}
            rows += [at | {"layer": layer, "norm": norm} for layer, norm in layers.items()]
    return pd.DataFrame(rows).astype({"lr": float})


def choose_rates(cells: pd.DataFrame, layers: int) -> dict[tuple[str, bool], float]:
    """Choose, per arm, the learning rate with the lowest mean training loss over the seeds.

    Rates at which no cell diverged are preferred.
    """
    chosen: dict[tuple[str, bool], float] = {}
    for arm, group in cells[cells["layers"] == layers].groupby(ARM):
        by_rate = group.groupby("lr").agg(loss=("train_loss", "mean"), bad=("state", lambda s: (s == "diverged").any()))
        chosen[arm] = float(by_rate.sort_values(["bad", "loss"]).index[0])
    return chosen


def at_chosen_rates(rows: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    """Keep the rows at the learning rate chosen for their arm (columns order, scaled and lr)."""
    rates = choose_rates(cells, factorial)
    return rows[[rates.get((row.order, row.scaled)) == row.lr for row in rows.itertuples()]]


def learned_means(cells: pd.DataFrame) -> pd.Series:
    """Mean training loss by learning rate, of the rates at which all runs learned."""
    learned = cells.groupby("lr").filter(lambda rows: (rows["state"] == "learned").all())
    return learned.groupby("lr")["train_loss"].mean()
