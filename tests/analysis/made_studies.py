"""Records of the first norm-order study with given losses, and cells of the second with planted outcomes."""

import itertools
from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis.norm_order.cells import CANDIDATES, LOSS
from analysis.norm_order.limits import place
from analysis.norm_order.run import Cell, read_groups
from analysis.norm_order.run_folder import NATS

LOSSES = {"pre": 3.6, "post": 3.45, "b2t": 3.46}
LIMITS = {  # places of the largest rates at which they learn at 6, 12, 24 and 48 layers
    "pre": {6: 5, 12: 5, 24: 5, 48: 5},
    "post": {6: 6, 12: 5, 24: 4, 48: 3},
    "b2t": {6: 6, 12: 5, 24: 5, 48: 5},
}


def make_cell(layers: int, order: str, scaled: bool, lr: str, seed: int, loss: float, **metrics: float) -> dict:
    """The parts of a record that are read, with a given loss."""
    values = {"train_loss": loss, "lowest_loss": loss, "validation_loss": loss}
    values |= {"context_free_loss": 6.0, "scored_entropy": 6.5}
    values |= {"non_finite": 0, "cpu_time": 2.0} | metrics
    cell = {"layers": layers, "order": order, "scaled": scaled, "lr": lr, "seed": seed}
    norms = {"embedding": 1.0, "output": 1.0} | {f"layer_{i}": 0.1 * (i + 1) for i in range(layers)}
    config = {"cell": cell, "window": 25, "curve": [5.0, loss], "gradient_norms": {"1": norms, "50": norms}}
    return {"config": config, "metrics": {name: {"value": value, "unit": NATS} for name, value in values.items()}}


def make_study(**changed: dict) -> list[dict]:
    """Two depths: pre-norm is better by 0.5, both share a seed effect, and 3e-3 is the better rate.

    Args:
        changed: loss and metrics of a cell by its place, as in `_8_post_1` (at scaled initialization and 3e-3).
    """
    records = []
    for order, scaled, seed in itertools.product(("pre", "post"), (True, False), (1, 2, 3)):
        loss = 4.0 + 0.1 * seed + (0.5 + 0.01 * (seed - 2)) * (order == "post") + 0.2 * (not scaled)
        for layers, lr, more in ((4, "1e-3", 0.3), (4, "3e-3", 0.0), (8, "3e-3", 0.1)):
            own = changed.get(f"_{layers}_{order}_{seed}", {}) if scaled and lr == "3e-3" else {}
            records.append(make_cell(layers, order, scaled, lr, seed, **{"loss": loss + more} | own))
    return records


def learns(cell: Cell) -> bool:
    """Post-norm's limit falls as 1 / depth; a longer warm-up and DeepNorm lift it; cells of `mechanism` are stuck."""
    if 200 < cell.seed < 300:
        return cell.order == "deepnorm" or cell.warmup == 400
    return place(float(cell.lr)) <= LIMITS[cell.order][cell.layers] + (cell.warmup == 400)


def loss(cell: Cell) -> float:
    """Lowest at 3e-3; post-norm 0.15 nats below pre-norm; some noise by seed."""
    noise = np.random.default_rng([cell.seed, cell.layers, *cell.order.encode()]).normal(0, 0.01)
    away = abs(place(float(cell.lr)) - 4) if cell.seed in (101, 102) else 0
    return LOSSES.get(cell.order, 3.5) + 0.05 * away + 0.002 * cell.seed % 0.1 + noise


def tells(cell: Cell, stuck: bool) -> dict[str, float]:
    """Only the share of the MLP tells stuck cells."""
    noise = np.random.default_rng([cell.seed, cell.layers, cell.warmup, place(float(cell.lr))]).uniform(0, 0.1, 6)
    values = dict(zip([*CANDIDATES, LOSS], noise, strict=True))
    return values | {"constant_share/mlp": values["constant_share/mlp"] + (0.8 if stuck else 0.3)}


def make_cells(
    learns: Callable[[Cell], bool] = learns,
    loss: Callable[[Cell], float] = loss,
    tells: Callable[[Cell, bool], dict[str, float]] = tells,
    study: str = "second",
) -> pd.DataFrame:
    """All cells of the study, as `study_cells` gives them."""
    rows = []
    for group, cell in read_groups(study):
        learned = learns(cell)
        final = loss(cell) if learned else 4.74
        found = {"group": group, "id": cell.name} | vars(cell) | {"lr": float(cell.lr)}
        found |= {"state": "learned" if learned else "stuck", "train_loss": final, "validation_loss": final + 0.02}
        rows.append(found | {"cpu_time": 100.0, "cpu": "a CPU"} | tells(cell, not learned))
    return pd.DataFrame(rows)
