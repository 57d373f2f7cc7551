"""Tables 1, 2, 7 and 8 of the paper: its value, ours, the difference, and what kind of evidence ours is."""

import pandas as pd

from ..config.cluster import Cluster
from ..planner.params import count_parameters
from .ledger import DATA_RANKS, GPT_MODELS, STUDY_MODELS
from .scaling import CELLS, SIZES, TRAINING_DAYS, predict_cell, predict_days, study_model


def scaling_tables(cluster: Cluster) -> dict[str, pd.DataFrame]:
    """The tables of the scaling study by name.

    Args:
        cluster: the anchored cluster of `analysis/fit_cost_model.py`.

    Returns:
        rows with columns `paper`, `ours`, `difference` (ours - paper), `unit` and `evidence`: `exact` is counted,
        `modelled` comes from the cost model; the latter says whether the cell was in the fit.
    """
    return {
        "Table 1": pd.DataFrame(
            [_parameters(name, row.parameters * 1e3, row.tp_size * DATA_RANKS) for name, row in STUDY_MODELS.items()]
        ),
        "Table 2": pd.DataFrame(_training_rows(cluster)),
        "Table 7": pd.DataFrame(_cells("Table 7", cluster)),
        "Table 8": pd.DataFrame(_cells("Table 8", cluster)),
    }


def _parameters(size: str, printed_millions: float, num_gpus: int) -> dict:
    ours = count_parameters(study_model(*SIZES[size])).total / 1e6
    row = {"configuration": f"{size}, {num_gpus} GPUs", "paper": printed_millions, "ours": ours}
    return row | {"difference": ours - printed_millions, "unit": "million parameters", "evidence": "exact"}


def _training_rows(cluster: Cluster) -> list[dict]:
    """Parameters and days an epoch: of the optimizer steps alone, and with validation as the released code has it."""
    rows = []
    for size, heads, tp_size, dp_size, days in TRAINING_DAYS:
        rows.append(_parameters(size, GPT_MODELS[size].parameters, tp_size * dp_size))
        alone, validated = predict_days(size, heads, tp_size, dp_size, cluster)
        for ours, unit in ((validated, "days an epoch"), (alone, "days an epoch, steps alone")):
            row = {"configuration": f"{size}, {tp_size * dp_size} GPUs", "paper": days, "ours": ours}
            rows.append(row | {"difference": ours - days, "unit": unit, "evidence": "modelled, held out"})
    return rows


def _cells(table: str, cluster: Cluster) -> list[dict]:
    """Scaling efficiencies of Table 7, speed-ups of Table 8."""
    rows = []
    for cell in (cell for cell in CELLS if cell.table == table):
        factor = cell.tp_size / 100 if table == "Table 8" else 1.0
        paper, ours = cell.paper * factor, predict_cell(cell, cluster) * factor
        row = {"configuration": f"{cell.size}, {cell.label}", "paper": paper, "ours": ours, "difference": ours - paper}
        unit = "speed-up" if table == "Table 8" else "% of linear scaling"
        rows.append(row | {"unit": unit, "evidence": f"modelled, {cell.role}"})
    return rows
