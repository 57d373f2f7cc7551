"""Tables 1, 2, 7 and 8 and the bars of Figures 1 and 5: the paper's value, ours, and the kind of evidence."""

import pandas as pd

from analysis.ledger.entries import PAPER as PAPER_NUMBERS
from lmscale.config.cluster import Cluster
from lmscale.planner.params import count_parameters

from .study import (
    BASELINE_FLOPS_PER_S,
    CELLS,
    DATA_RANKS,
    PETAFLOPS_512,
    SIZES,
    STUDY_TP_SIZES,
    TRAINING_DAYS,
    Cell,
    predict_cell,
    predict_days,
    predict_petaflops,
    study_model,
)

PAPER, OURS = "paper", "lmscale, modelled"
_PRINTED = {"text": "printed in the text", "figure": "read off the figure"}


def figure_cells() -> tuple[Cell, ...]:
    """The one-GPU baseline (100 by definition), then the cells of Figure 5."""
    first = Cell("Figure 5", "MP, 1 GPU", "1.2B", 16, 1, 1, "figure_5/mp/1_gpu", "text", "baseline")
    return (first, *(cell for cell in CELLS if cell.table == "Figure 5"))


def paper_petaflops(cell: Cell) -> tuple[float, bool]:
    """The paper's sustained PFLOP/s of a cell of `figure_cells`, and whether the paper prints it.

    The paper prints 39 TFLOP/s on one GPU and 15.1 PFLOP/s on 512. The others are derived from Figure 5.
    """
    num_gpus = cell.layout.world_size
    printed = {1: BASELINE_FLOPS_PER_S / 1e15, 512: PETAFLOPS_512}
    if num_gpus in printed:
        return printed[num_gpus], True
    return cell.paper / 100 * num_gpus * BASELINE_FLOPS_PER_S / 1e15, False


def _place(cell: Cell) -> dict:
    """What a cell is called in the tables (`model parallel, 8 GPUs`) and where it stands in the figures."""
    panel, num_gpus = "model parallel" if cell.dp_size == 1 else "model + data parallel", cell.layout.world_size
    return {"configuration": f"{panel}, {num_gpus} GPU{'s' * (num_gpus > 1)}", "panel": panel, "GPUs": num_gpus}


def figure_5_rows(cluster: Cluster) -> pd.DataFrame:
    """Weak scaling in % of linear: the paper's value, the cost model's, the difference and the role of every cell."""
    rows = []
    for cell in figure_cells():
        ours = predict_cell(cell, cluster)
        row = _place(cell) | {PAPER: cell.paper, OURS: ours, "difference": ours - cell.paper}
        rows.append(row | {"role": cell.role, "certainty": cell.certainty})
    return pd.DataFrame(rows)


def figure_1_rows(cluster: Cluster) -> pd.DataFrame:
    """Sustained PFLOP/s of the study's models without and with 64-way data parallelism, for the cells of Figure 5."""
    rows = []
    for cell in figure_cells():
        paper, printed = paper_petaflops(cell)
        ours = paper if cell.role == "baseline" else predict_petaflops(cluster, cell)  # the anchor
        row = _place(cell) | {PAPER: paper, OURS: ours, "difference": ours / paper - 1}
        rows.append(row | {"certainty": "text" if printed else "figure"})
    return pd.DataFrame(rows)


def figure_tables(cluster: Cluster) -> dict[str, pd.DataFrame]:
    """Tables of Figures 1 and 5, with the columns of `scaling_tables` and the origin of the paper's value."""
    one, five = figure_1_rows(cluster), figure_5_rows(cluster)
    sustained = ["the anchor" if num_gpus == 1 else "modelled" for num_gpus in one["GPUs"]]
    scaling = ["by definition" if role == "baseline" else f"modelled, {role}" for role in five["role"]]
    derived = _PRINTED | {"figure": "Figure 5 x 39 TFLOP/s x GPUs"}
    found = {"Figure 1": _table(one, "PFLOP/s", sustained, derived)}
    return found | {"Figure 5": _table(five, "% of linear scaling", scaling, _PRINTED)}


def _table(rows: pd.DataFrame, unit: str, evidence: list[str], printed: dict[str, str]) -> pd.DataFrame:
    table = pd.DataFrame({"configuration": rows["configuration"], "paper": rows[PAPER], "ours": rows[OURS]})
    more = {"difference": rows[OURS] - rows[PAPER], "unit": unit, "evidence": evidence}
    return table.assign(**more, **{"the paper's value": rows["certainty"].map(printed)})


def scaling_tables(cluster: Cluster) -> dict[str, pd.DataFrame]:
    """The tables of the scaling study by name.

    Args:
        cluster: the anchored cluster of `analysis/scaling/fit_cost_model.py`.

    Returns:
        rows with columns `paper`, `ours`, `difference` (ours - paper), `unit` and `evidence`: `exact` is counted,
        `modelled` comes from the cost model and states whether the cell was in the fit.
    """
    billions = {size: PAPER_NUMBERS[f"table_1/gpt_{size.lower()}/parameters"] for size in STUDY_TP_SIZES}
    rows = {
        "Table 1": [_parameters(s, billions[s] * 1e3, n * DATA_RANKS) for s, n in STUDY_TP_SIZES.items()],
        "Table 2": _training_rows(cluster),
        "Table 7": _cells("Table 7", cluster),
        "Table 8": _cells("Table 8", cluster),
    }
    return {name: pd.DataFrame(found) for name, found in rows.items()}


def _parameters(size: str, printed_millions: float, num_gpus: int) -> dict:
    ours = count_parameters(study_model(*SIZES[size])).total / 1e6
    return _row(f"{size}, {num_gpus} GPUs", printed_millions, ours, "million parameters", "exact")


def _row(configuration: str, paper: float, ours: float, unit: str, evidence: str) -> dict:
    row = {"configuration": configuration, "paper": paper, "ours": ours, "difference": ours - paper}
    return row | {"unit": unit, "evidence": evidence}


def _training_rows(cluster: Cluster) -> list[dict]:
    """Parameters and days per epoch: of the optimizer steps alone, and with validation as in the released code."""
    rows = []
    for cell in TRAINING_DAYS:
        printed = PAPER_NUMBERS[cell.entry.replace("days", "parameters")]
        rows.append(_parameters(cell.size, printed, cell.layout.world_size))
        alone, validated = predict_days(cell, cluster)
        for ours, unit in ((validated, "days per epoch"), (alone, "days per epoch, steps alone")):
            rows.append(_row(rows[-1]["configuration"], cell.paper, ours, unit, "modelled, held out"))
    return rows


def _cells(table: str, cluster: Cluster) -> list[dict]:
    """Scaling efficiencies of Table 7, speed-ups of Table 8."""
    rows = []
    for cell in (cell for cell in CELLS if cell.table == table):
        factor = cell.tp_size / 100 if table == "Table 8" else 1.0
        paper, ours = cell.paper * factor, predict_cell(cell, cluster) * factor
        unit = "speed-up" if table == "Table 8" else "% of linear scaling"
        rows.append(_row(f"{cell.size}, {cell.label}", paper, ours, unit, f"modelled, {cell.role}"))
    return rows
