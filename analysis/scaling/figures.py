"""Figures 1 and 5 (hatched bars are not in the cost model's fit); parameters and memory of the paper's models."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.report.style import BLUE, COLUMN_WIDTH, ORANGE, PALETTE, column_style

from .study import BASELINE_FLOPS_PER_S
from .tables import OURS, PAPER

_LABELS = {"edge": ("black", "black"), "center": ("white", "white")}  # colors legible at that position
_COLORS = {PAPER: PALETTE["paper"], OURS: PALETTE["ours"]}
_PARTS = {"layers": BLUE, "embeddings": ORANGE, "other": "0.8"}
_HATCHES = {"layers": "", "embeddings": "//", "other": ".."}


def draw_figure_5(rows: pd.DataFrame) -> Figure:
    """Draw weak scaling as bars in two panels, as in the paper.

    Args:
        rows: result of `figure_5_rows`.
    """
    with column_style("whitegrid"):
        figure = _two_panels(rows, ["% of linear scaling"] * 2, sharey=True, fmt="%.0f")
        figure.axes[0].set(ylim=(0, 110))
    return figure


def draw_figure_1(rows: pd.DataFrame) -> Figure:
    """Draw weak scaling in FLOP/s, with linear scaling as markers.

    Args:
        rows: result of `figure_1_rows`.
    """
    rows = rows.assign(linear=rows["GPUs"] * BASELINE_FLOPS_PER_S / 1e15)
    rows.loc[rows["GPUs"] <= 8, [PAPER, OURS, "linear"]] *= 1e3  # the left panel, in TFLOP/s
    with column_style("whitegrid"):
        return _two_panels(rows, ["TFLOP/s", "PFLOP/s"], sharey=False, fmt="%.3g", label_type="center")


def _two_panels(rows: pd.DataFrame, units: list[str], sharey: bool, **numbers: str) -> Figure:
    """Draw bars of both sources over the number of GPUs, without data parallelism (left) and with it (right).

    A column `linear` is drawn as markers, a column `role` as hatching; `numbers` goes to `bar_label`.
    """
    figure = Figure(figsize=(2 * COLUMN_WIDTH, 2.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=sharey)
    for axis, unit, (panel, part) in zip(axes, units, rows.groupby("panel", sort=False), strict=True):
        tall = part.melt(id_vars=["GPUs"], value_vars=[PAPER, OURS], var_name="source", value_name="value")
        sns.barplot(tall, x="GPUs", y="value", hue="source", ax=axis, palette=_COLORS, saturation=1)
        axis.set(title=f"{panel} (V100)", ylabel=unit)
        for container, color in zip(axis.containers, _LABELS[numbers.get("label_type", "edge")], strict=True):
            axis.bar_label(container, fontsize=7, color=color, **numbers)
        for bar, role in zip(axis.containers[1], part.get("role", []), strict=False):
            bar.set_hatch("//" if role in ("held out", "outlier") else "")
        axis.get_legend().remove()
        if "linear" in part:
            marks = {"color": "0.4", "marker": "_", "markersize": 22, "linestyle": "none"}
            axis.plot(range(len(part)), part["linear"], label="linear", **marks)
            axis.margins(y=0.1)
    handles, labels = axes[0].get_legend_handles_labels()
    if "role" in rows:
        handles.append(Patch(facecolor=PALETTE["ours"], edgecolor="white", hatch="//"))
        labels.append("not in the fit")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_parts(rows: pd.DataFrame) -> Figure:
    """Draw the shares of layers, embeddings and other parameters per model.

    Args:
        rows: result of `parameter_table`.
    """
    with column_style():
        figure = Figure(figsize=(COLUMN_WIDTH, 2.8), layout="constrained")
        axis = figure.subplots()
        left = pd.Series(0.0, index=rows.index)
        for part, color in _PARTS.items():
            share = 100 * rows[part] / rows["total"]
            axis.barh(rows["model"], share, left=left, color=color, edgecolor="black", linewidth=0.4, label=part)
            for bar in axis.containers[-1]:
                bar.set_hatch(_HATCHES[part])
            left += share
        axis.invert_yaxis()
        axis.set(xlabel="% of the parameters", xlim=(0, 100))
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        sns.despine(figure)
    return figure


def draw_memory_wall(rows: pd.DataFrame, devices: dict[str, float]) -> Figure:
    """Draw memory per rank over tensor-parallel size with full recomputation, and the capacity of devices.

    Args:
        rows: result of `memory_table`.
        devices: capacity in GiB by name.
    """
    rows = rows[(rows["recompute"] == "full") & rows["model"].str.startswith("gpt")]
    tall = rows.melt("model", [column for column in rows if column.startswith("tp ")], "tp", "GiB").dropna()
    tall["tensor ranks"] = tall["tp"].str.removeprefix("tp ").astype(int)
    with column_style():
        figure = Figure(figsize=(COLUMN_WIDTH, 3.0), layout="constrained")
        axis = figure.subplots()
        look = {"hue": "model", "style": "model", "markers": True, "palette": "colorblind"}
        sns.lineplot(tall, x="tensor ranks", y="GiB", ax=axis, **look)
        for name, gib in devices.items():
            axis.axhline(gib, color="0.4", linewidth=0.8, linestyle=":")
            axis.text(8.2, gib, name, fontsize=6.5, va="center")
        sizes = sorted(tall["tensor ranks"].unique())
        axis.set(xscale="log", yscale="log", ylabel="GiB per rank")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_yticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        axis.minorticks_off()
        handles, labels = axis.get_legend_handles_labels()
        axis.get_legend().remove()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        sns.despine(figure)
    return figure
