"""Rows of Figures 1 and 5: the paper's value, the cost model's, and where each is from."""

import pandas as pd

from ..perf.cluster import Cluster
from ..perf.flops import hardware_flops_per_step
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


def figure_5_rows(cluster: Cluster) -> pd.DataFrame:
    """Weak scaling, % of linear: the paper's value, the model's, the difference and the role of every cell.

    The one-GPU cell is 100 by definition.
    """
    first = Cell("Figure 5", "MP, 1 GPU", "1.2B", 16, 1, 1, 100.0, "text", "baseline")
    rows = []
    for cell in (first, *(cell for cell in CELLS if cell.table == "Figure 5")):
        ours = predict_cell(cell, cluster)
        rows.append(
            {
                "panel": "model parallel" if cell.dp_size == 1 else "model + data parallel",
                "GPUs": cell.tp_size * cell.dp_size,
                PAPER: cell.paper,
                OURS: ours,
                "difference": ours - cell.paper,
                "role": cell.role,
                "certainty": cell.certainty,
            }
        )
    return pd.DataFrame(rows)


def figure_1_rows(cluster: Cluster) -> pd.DataFrame:
    """PFLOP/s sustained: one V100, and the study's models with 64-way data parallelism.

    The paper prints two of them, 39 TFLOP/s on one GPU and 15.1 PFLOP/s on 512; the others are its Figure 5 times the
    one-GPU figure, by parameters.
    """
    rows = [{"GPUs": 1, PAPER: BASELINE_FLOPS_PER_S / 1e15, OURS: BASELINE_FLOPS_PER_S / 1e15, "certainty": "text"}]
    for cell in CELLS:
        if cell.table != "Figure 5" or cell.dp_size == 1:
            continue
        layers, hidden, _ = SIZES[cell.size]
        config, num_gpus = study_model(layers, hidden, cell.heads), cell.tp_size * cell.dp_size
        seconds = study_time(config, cell.tp_size, cell.dp_size, cluster).total
        ours = hardware_flops_per_step(config, SEQ_LENGTH, MICRO_BATCH * cell.dp_size) / seconds / 1e15
        printed = num_gpus == 512
        paper = PETAFLOPS_512 if printed else cell.paper / 100 * num_gpus * BASELINE_FLOPS_PER_S / 1e15
        rows.append({"GPUs": num_gpus, PAPER: paper, OURS: ours, "certainty": "text" if printed else "figure"})
    table = pd.DataFrame(rows)
    table["difference"] = table[OURS] / table[PAPER] - 1
    return table


def figure_tables(cluster: Cluster) -> dict[str, pd.DataFrame]:
    """Both figures' rows as tables, with the columns of `scaling_tables` and where the paper's value is from."""
    five, one = figure_5_rows(cluster), figure_1_rows(cluster)
    scaling = pd.DataFrame({"configuration": [f"{row.panel}, {_gpus(row.GPUs)}" for row in five.itertuples()]})
    scaling["paper"], scaling["ours"] = five[PAPER], five[OURS]
    scaling["difference"], scaling["unit"] = five["difference"], "% of linear scaling"
    scaling["evidence"] = ["by definition" if role == "baseline" else f"modelled, {role}" for role in five["role"]]
    scaling["the paper's value"] = five["certainty"].map(_PRINTED)
    sustained = pd.DataFrame({"configuration": [_gpus(n) for n in one["GPUs"]]})
    sustained["paper"], sustained["ours"] = one[PAPER], one[OURS]
    sustained["difference"], sustained["unit"] = one[OURS] - one[PAPER], "PFLOP/s"
    sustained["evidence"] = ["the anchor" if num_gpus == 1 else "modelled" for num_gpus in one["GPUs"]]
    printed = _PRINTED | {"figure": "Figure 5 times 39 TFLOP/s and the GPUs"}
    sustained["the paper's value"] = one["certainty"].map(printed)
    return {"Figure 1": sustained, "Figure 5": scaling}


def _gpus(num_gpus: int) -> str:
    return "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
