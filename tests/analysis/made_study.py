"""Cells of the second norm-order study with planted outcomes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import yaml

from analysis.norm_order.limits import cells_to_add, place, read_limits
from analysis.norm_order.mechanism import CANDIDATES, LOSS
from analysis.norm_order.study import StudyCell, read_groups

BEST = {"pre": 4, "post": 3, "b2t": 4}  # places of the best rates: 3e-3, 1.5e-3
LOSSES = {"pre": 3.6, "post": 3.45, "b2t": 3.46}
LIMITS = {  # at 6, 12, 24 and 48 layers
    "pre": {6: 5, 12: 5, 24: 5, 48: 5},
    "post": {6: 6, 12: 5, 24: 4, 48: 3},
    "b2t": {6: 6, 12: 5, 24: 5, 48: 5},
}


def learns(cell: StudyCell) -> bool:
    """Post-norm's limit falls as 1 / depth; a longer warm-up and DeepNorm lift it; cells of `mechanism` are stuck."""
    if cell.seed > 200 and cell.seed < 300:
        return cell.order == "deepnorm" or cell.warmup == 400
    limits = LIMITS.get(cell.order, dict.fromkeys((6, 12, 24, 48), 6))
    return place(float(cell.lr)) <= limits[cell.layers] + (cell.warmup == 400)


def loss(cell: StudyCell) -> float:
    """Lowest at the best rate; post-norm 0.15 nats below pre-norm; some noise by seed."""
    best = 4 if cell.family == "gpt" else BEST.get(cell.order, 4)
    noise = np.random.default_rng([cell.seed, cell.layers, *cell.order.encode()]).normal(0, 0.01)
    return LOSSES.get(cell.order, 3.5) + 0.05 * abs(place(float(cell.lr)) - best) + 0.002 * cell.seed % 0.1 + noise


def tells(cell: StudyCell, stuck: bool) -> dict[str, float]:
    """Only the share of the MLP tells stuck cells."""
    noise = np.random.default_rng([cell.seed, cell.layers, cell.warmup, place(float(cell.lr))]).uniform(0, 0.1, 6)
    values = dict(zip([*CANDIDATES, LOSS], noise, strict=True))
    return values | {"constant_share/mlp": values["constant_share/mlp"] + (0.8 if stuck else 0.3)}


def row(
    group: str,
    cell: StudyCell,
    learns: Callable[[StudyCell], bool] = learns,
    loss: Callable[[StudyCell], float] = loss,
    tells: Callable[[StudyCell, bool], dict[str, float]] = tells,
) -> dict:
    """One row as `read_study` gives it."""
    if cell.lr == "chosen":
        best = 4 if cell.family == "gpt" else BEST[cell.order]
        cell = replace(cell, lr=str(0.1875e-3 * 2**best))
    learned = learns(cell)
    final = loss(cell) if learned else 4.74
    found = {"group": group, "id": cell.name} | vars(cell) | {"lr": float(cell.lr)}
    found |= {"state": "learned" if learned else "stuck", "train_loss": final, "validation_loss": final + 0.02}
    return found | {"cpu_time": 100.0, "cpu": "a CPU"} | tells(cell, not learned)


def make_cells(**planted: Callable) -> pd.DataFrame:
    """All cells of the study with what the grid's rule adds."""
    cells = pd.DataFrame([row(group, cell, **planted) for group, cell in read_groups()])
    while added := list(cells_to_add(read_limits(cells))):
        rows = [row(*each, **planted) for text in added for each in parse(text)]
        cells = pd.concat([cells, pd.DataFrame(rows)], ignore_index=True)
    return cells


def parse(text: str) -> list[tuple[str, StudyCell]]:
    """The cells of a group's text in `cells.yaml`."""
    (group,) = yaml.safe_load(text)
    lists = {key: values if isinstance(values, list) else [values] for key, values in group["cells"].items()}
    (layers,), (order,), (lr,) = lists.pop("layers"), lists.pop("order"), lists.pop("lr")
    seeds, more = lists.pop("seed"), {key: value for key, (value,) in lists.items()}
    return [(group["name"], StudyCell(layers, order, str(float(lr)), seed, **more)) for seed in seeds]


def without(cells: pd.DataFrame, where: pd.Series) -> pd.DataFrame:
    """The cells, some of them without a record."""
    measured = ["train_loss", "validation_loss", "cpu_time", "cpu", *CANDIDATES, LOSS]
    missing = cells[measured].mask(where)
    return cells.assign(state=cells["state"].where(~where, None), **missing)
