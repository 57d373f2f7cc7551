"""Figures 1 and 5: the paper's bars beside the cost model's, with the kind of evidence in the legend.

    python analysis/make_figures.py                 # outputs/figures/figure_1.png, figure_5.png

The model's constants were fitted to half of the cells (analysis/fit_cost_model.py); hatched bars were not in the fit.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files, no window

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.patches import Patch

from lmscale.from_plain import build
from lmscale.perf.cluster import Cluster
from lmscale.report.scaling import BASELINE_FLOPS_PER_S
from lmscale.report.scaling_figures import OURS, PAPER, figure_1_rows, figure_5_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "analysis" / "results"


def fitted_cluster(record: Path = RESULTS / "cost_model.json") -> Cluster:
    """The anchored cluster of a cost-model record."""
    values = json.loads(record.read_text(encoding="utf-8"))["config"]["cluster"]
    return build(Cluster, values, "cluster.")


def draw_figure_5(rows: pd.DataFrame, path: Path) -> None:
    """Two panels of bars, as in the paper."""
    sns.set_theme(style="whitegrid")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True)
    for axis, (panel, part) in zip(axes, rows.groupby("panel", sort=False), strict=True):
        tall = part.melt(id_vars=["GPUs", "role"], value_vars=[PAPER, OURS], var_name="source", value_name="percent")
        sns.barplot(tall, x="GPUs", y="percent", hue="source", ax=axis, palette="deep")
        axis.set(title=f"{panel} (V100)", ylabel="% of linear scaling", ylim=(0, 110))
        for container in axis.containers:
            axis.bar_label(container, fmt="%.0f", fontsize=8)
        for bar, role in zip(axis.containers[1], part["role"], strict=True):
            bar.set_hatch("//" if role in ("held out", "outlier") else "")
        axis.get_legend().remove()
    handles, labels = axes[0].get_legend_handles_labels()
    handles.append(Patch(facecolor="white", edgecolor="grey", hatch="//"))
    figure.tight_layout(rect=(0, 0.08, 1, 1))  # the legend stands below the bars, not on them
    figure.legend(handles, [*labels, "not in the fit"], loc="lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_figure_1(rows: pd.DataFrame, path: Path) -> None:
    """Both sources and linear scaling over the number of GPUs."""
    sns.set_theme(style="whitegrid")
    figure, axis = plt.subplots(figsize=(6, 4))
    tall = rows.melt(id_vars=["GPUs"], value_vars=[PAPER, OURS], var_name="source", value_name="PFLOP/s")
    sns.lineplot(tall, x="GPUs", y="PFLOP/s", hue="source", style="source", markers=True, ax=axis)
    linear = rows["GPUs"] * BASELINE_FLOPS_PER_S / 1e15
    axis.plot(rows["GPUs"], linear, color="grey", linestyle=":", label="linear")
    axis.set(xscale="log", yscale="log", title="Sustained on V100, 64-way data parallel above one GPU")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_all(results: Path, folder: Path, suffix: str = "png") -> dict[Path, str]:
    """Draw every figure of a folder of records, in the format of `suffix`; returns the files and what each shows."""
    cluster = fitted_cluster(results / "cost_model.json")
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for number, rows, draw, title in (
        (1, figure_1_rows(cluster), draw_figure_1, "Sustained PFLOP/s, the paper's and the cost model's"),
        (5, figure_5_rows(cluster), draw_figure_5, "Weak scaling, the paper's bars and the cost model's"),
    ):
        path = folder / f"figure_{number}.{suffix}"
        draw(rows, path)
        figures[path] = f"Figure {number}. {title}"
        print(f"Figure {number} (paper; ours modelled)\n{rows.round(3).to_string(index=False)}\n")
    return figures


def main() -> int:
    """Draw all and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of records")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "figures")
    options = parser.parse_args()
    draw_all(options.records, options.folder)
    print(f"figures: {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
