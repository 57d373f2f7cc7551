"""Figures 1 and 5: the paper's bars beside the cost model's; hatched bars were not in the model's fit."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..scaling import BASELINE_FLOPS_PER_S
from ..scaling_figures import OURS, PAPER
from .style import COLUMN_WIDTH, PALETTE, column_style

_COLORS = {PAPER: PALETTE["paper"], OURS: PALETTE["ours"]}


def draw_figure_5(rows: pd.DataFrame) -> Figure:
    """Weak scaling in two panels of bars, as in the paper.

    Args:
        rows: of `figure_5_rows`.
    """
    with column_style("whitegrid"):
        figure = Figure(figsize=(2 * COLUMN_WIDTH, 2.8), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (panel, part) in zip(axes, rows.groupby("panel", sort=False), strict=True):
            sides = {"value_vars": [PAPER, OURS], "var_name": "source", "value_name": "percent"}
            tall = part.melt(id_vars=["GPUs", "role"], **sides)
            sns.barplot(tall, x="GPUs", y="percent", hue="source", ax=axis, palette=_COLORS, saturation=1)
            axis.set(title=f"{panel} (V100)", ylabel="% of linear scaling", ylim=(0, 110))
            for container in axis.containers:
                axis.bar_label(container, fmt="%.0f", fontsize=7)
            for bar, role in zip(axis.containers[1], part["role"], strict=True):
                bar.set_hatch("//" if role in ("held out", "outlier") else "")
            axis.get_legend().remove()
        handles, labels = axes[0].get_legend_handles_labels()
        handles.append(Patch(facecolor=PALETTE["ours"], edgecolor="white", hatch="//"))
        figure.legend(handles, [*labels, "not in the fit"], loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_figure_1(rows: pd.DataFrame) -> Figure:
    """Both sources as bars with their values, and linear scaling as marks, over the number of GPUs.

    Args:
        rows: of `figure_1_rows`.
    """
    with column_style("whitegrid"):
        figure = Figure(figsize=(COLUMN_WIDTH, 2.6), layout="constrained")
        axis = figure.subplots()
        tall = rows.melt(id_vars=["GPUs"], value_vars=[PAPER, OURS], var_name="source", value_name="PFLOP/s")
        sns.barplot(tall, x="GPUs", y="PFLOP/s", hue="source", ax=axis, palette=_COLORS, saturation=1)
        for container in axis.containers:
            axis.bar_label(container, fmt="%.3g", fontsize=7)
        linear = rows["GPUs"] * BASELINE_FLOPS_PER_S / 1e15
        axis.plot(range(len(rows)), linear, color="0.4", marker="_", markersize=24, linestyle="none", label="linear")
        axis.set(title="sustained; V100, 64-way data parallel")
        axis.legend(frameon=False)
    return figure
