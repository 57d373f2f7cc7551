"""Rows of Figures 1 and 5: the paper's value, the cost model's, and where each is from."""

import pandas as pd

from ..config.cluster import Cluster
from ..planner.flops import hardware_flops_per_step
from .ledger import SEQ_LENGTH
from .scaling import (
    BASELINE_FLOPS_PER_S,
    CELLS,
    MICRO_BATCH,
    PETAFLOPS_512,
    SIZES,
    Cell,
    predict_cell,
    study_model,
    study_time,
)

PAPER, OURS = "paper", "lmscale, modelled"
_PRINTED = {"text": "printed in the text", "figure": "read off the figure"}


def figure_cells() -> tuple[Cell, ...]:
    """The cells of Figure 5, and before them the one GPU that is 100 by definition."""
    first = Cell("Figure 5", "MP, 1 GPU", "1.2B", 16, 1, 1, 100.0, "text", "baseline")
    return (first, *(cell for cell in CELLS if cell.table == "Figure 5"))


def paper_petaflops(cell: Cell) -> tuple[float, bool]:
    """The paper's sustained PFLOP/s of a cell of `figure_cells`, and whether they are printed.

    Printed are 39 TFLOP/s on one GPU and 15.1 PFLOP/s on 512; the others are Figure 5 times the one-GPU figure.
    """
    num_gpus = cell.tp_size * cell.dp_size
    printed = {1: BASELINE_FLOPS_PER_S / 1e15, 512: PETAFLOPS_512}
    if num_gpus in printed:
        return printed[num_gpus], True
    return cell.paper / 100 * num_gpus * BASELINE_FLOPS_PER_S / 1e15, False


def configuration(cell: Cell) -> str:
    """A cell as it is called in the tables: `model parallel, 8 GPUs`."""
    num_gpus = cell.tp_size * cell.dp_size
    return f"{_panel(cell)}, {num_gpus} GPU{'s' if num_gpus > 1 else ''}"


def _panel(cell: Cell) -> str:
    return "model parallel" if cell.dp_size == 1 else "model + data parallel"


def _place(cell: Cell) -> dict:
    return {"configuration": configuration(cell), "panel": _panel(cell), "GPUs": cell.tp_size * cell.dp_size}


def figure_5_rows(cluster: Cluster) -> pd.DataFrame:
    """Weak scaling, % of linear: the paper's value, the model's, the difference and the role of every cell."""
    rows = []
    for cell in figure_cells():
        ours = predict_cell(cell, cluster)
        row = _place(cell) | {PAPER: cell.paper, OURS: ours, "difference": ours - cell.paper}
        rows.append(row | {"role": cell.role, "certainty": cell.certainty})
    return pd.DataFrame(rows)


def figure_1_rows(cluster: Cluster) -> pd.DataFrame:
    """PFLOP/s sustained by the study's models, without and with 64-way data parallelism: as of Figure 5."""
    rows = []
    for cell in figure_cells():
        layers, hidden, _ = SIZES[cell.size]
        config = study_model(layers, hidden, cell.heads)
        paper, printed = paper_petaflops(cell)
        ours = paper  # the anchor
        if cell.role != "baseline":
            seconds = study_time(config, cell.tp_size, cell.dp_size, cluster).total
            ours = hardware_flops_per_step(config, SEQ_LENGTH, MICRO_BATCH * cell.dp_size) / seconds / 1e15
        row = _place(cell) | {PAPER: paper, OURS: ours, "difference": ours / paper - 1}
        rows.append(row | {"certainty": "text" if printed else "figure"})
    return pd.DataFrame(rows)


def figure_tables(cluster: Cluster) -> dict[str, pd.DataFrame]:
    """Both figures' rows as tables, with the columns of `scaling_tables` and where the paper's value is from."""
    one, five = figure_1_rows(cluster), figure_5_rows(cluster)
    sustained = _table(one, "PFLOP/s", _PRINTED | {"figure": "Figure 5 times 39 TFLOP/s and the GPUs"})
    sustained["evidence"] = ["the anchor" if num_gpus == 1 else "modelled" for num_gpus in one["GPUs"]]
    scaling = _table(five, "% of linear scaling", _PRINTED)
    scaling["evidence"] = ["by definition" if role == "baseline" else f"modelled, {role}" for role in five["role"]]
    last = "the paper's value"
    return {name: t[[*t.columns.drop(last), last]] for name, t in (("Figure 1", sustained), ("Figure 5", scaling))}


def _table(rows: pd.DataFrame, unit: str, printed: dict[str, str]) -> pd.DataFrame:
    table = pd.DataFrame({"configuration": rows["configuration"], "paper": rows[PAPER], "ours": rows[OURS]})
    table["difference"], table["unit"] = rows[OURS] - rows[PAPER], unit
    table["the paper's value"] = rows["certainty"].map(printed)
    return table
