"""Figures 1 and 5 of the paper, by its numbers and by the cost model; parameters and memory of the paper's models."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.report.style import BLUE, GREY, ORANGE, PALETTE, house_style, label_ends, page_figure

from .sizes import paper_models
from .study import BASELINE_FLOPS_PER_S, MICRO_BATCH, STUDY_TP_SIZES, TRAINING_DAYS
from .tables import OURS, PAPER

_LABELS = {"edge": ("black", "black"), "center": ("white", "white")}  # colors legible at that position
_COLORS = {PAPER: PALETTE["paper"], OURS: PALETTE["ours"]}
_PARTS = {"layers": BLUE, "embeddings": ORANGE, "other": "0.8"}


def draw_figure_5(rows: pd.DataFrame) -> Figure:
    """Draw weak scaling as bars in two panels, as in the paper.

    Args:
        rows: result of `figure_5_rows`.
    """
    error = (rows[OURS] - rows[PAPER]).abs()
    worst, outlier = error[rows["role"] == "held out"].max(), error[rows["role"] == "outlier"].max()
    title = (
        f"Weak scaling: cells outside the fit are met within {worst:.1f} points, that at 128 GPUs within {outlier:.1f}"
    )
    with house_style("whitegrid"):
        hatched = (OURS, rows["role"].isin(("held out", "outlier")), "not in the fit")
        figure = _two_panels(rows, title, ["% of linear scaling"] * 2, hatched, sharey=True, fmt="%.0f")
        figure.axes[0].set(ylim=(0, 110))
    return figure


def draw_figure_1(rows: pd.DataFrame) -> Figure:
    """Draw weak scaling in FLOP/s, with linear scaling as markers.

    Args:
        rows: result of `figure_1_rows`.
    """
    largest = rows.iloc[-1]
    title = f"{largest['GPUs']} GPUs: modelled {largest[OURS]:.1f} PFLOP/s, paper {largest[PAPER]:.1f}"
    rows = rows.assign(linear=rows["GPUs"] * BASELINE_FLOPS_PER_S / 1e15)
    rows.loc[rows["GPUs"] <= 8, [PAPER, OURS, "linear"]] *= 1e3  # the left panel, in TFLOP/s
    with house_style("whitegrid"):
        hatched = (PAPER, rows["certainty"] == "figure", "derived: paper's Figure 5 x 39 TFLOP/s x GPUs")
        return _two_panels(rows, title, ["TFLOP/s", "PFLOP/s"], hatched, sharey=False, fmt="%.3g", label_type="center")


def _two_panels(
    rows: pd.DataFrame,
    title: str,
    units: list[str],
    hatched: tuple[str, pd.Series, str],
    sharey: bool,
    **numbers: str,
) -> Figure:
    """Draw bars of both sources over the number of GPUs, without data parallelism (left) and with it (right).

    A column `linear` is drawn as markers; `numbers` goes to `bar_label`.

    Args:
        hatched: source of the hatched bars, which rows they are of, and what hatching means.
    """
    figure = page_figure(title, 3.3)
    axes = figure.subplots(1, 2, sharey=sharey)
    for axis, unit, (panel, part) in zip(axes, units, rows.groupby("panel", sort=False), strict=True):
        tall = part.melt(id_vars=["GPUs"], value_vars=[PAPER, OURS], var_name="source", value_name="value")
        sns.barplot(tall, x="GPUs", y="value", hue="source", ax=axis, palette=_COLORS, saturation=1)
        axis.set(title=f"{panel} (V100)", ylabel=unit)
        colors = _LABELS[numbers.get("label_type", "edge")]
        for source, bars, color in zip((PAPER, OURS), axis.containers, colors, strict=True):
            texts = axis.bar_label(bars, fontsize=8, color=color, **numbers)
            for bar, text, is_hatched in zip(bars, texts, hatched[1][part.index], strict=True):
                if source == hatched[0] and is_hatched:
                    bar.set_hatch("//")
                    if color == "white":  # keep the number legible
                        text.set_bbox({"facecolor": _COLORS[source], "edgecolor": "none", "pad": 1})
        axis.get_legend().remove()
        if "linear" in part:
            marks = {"color": "0.4", "marker": "_", "markersize": 30, "linestyle": "none"}
            axis.plot(range(len(part)), part["linear"], label="linear", **marks)
            axis.margins(y=0.1)
    handles, labels = axes[0].get_legend_handles_labels()
    handles.append(Patch(facecolor=_COLORS[hatched[0]], edgecolor="white", hatch="//"))
    figure.legend(handles, [*labels, hatched[2]], loc="outside lower center", ncols=4, frameon=False, handlelength=3)
    return figure


def draw_parts(rows: pd.DataFrame) -> Figure:
    """Draw the shares of layers, embeddings and other parameters per model.

    Args:
        rows: result of `parameter_table`.
    """
    large = rows.loc[rows["total"] > 1000]  # million
    title = f"Above 1 B parameters, the layers hold {_least_share(large)} or more of a model"
    with house_style():
        figure = page_figure(title, 3.2)
        axis = figure.subplots()
        left = pd.Series(0.0, index=rows.index)
        for part, color in _PARTS.items():
            share = 100 * rows[part] / rows["total"]
            axis.barh(rows["model"], share, left=left, color=color, edgecolor="white", linewidth=0.6, label=part)
            left += share
        axis.bar_label(axis.containers[0], fmt="%.0f %%", label_type="center", color="white", fontsize=8)
        axis.invert_yaxis()
        axis.set(xlabel="% of the parameters", xlim=(0, 100))
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _least_share(rows: pd.DataFrame) -> str:
    return f"{(100 * rows['layers'] / rows['total']).min():.0f} %"


def draw_memory_wall(rows: pd.DataFrame, devices: dict[str, float]) -> Figure:
    """Draw memory per rank over tensor-parallel size with full recomputation, and what devices offer.

    A ring marks the paper's size.

    Args:
        rows: result of `memory_table`.
        devices: GiB for tensors by name.
    """
    rows = rows[(rows["recompute"] == "full") & rows["model"].str.startswith("gpt")]
    tall = rows.melt("model", [column for column in rows if column.startswith("tp ")], "tp", "GiB").dropna()
    tall["tensor ranks"] = tall["tp"].str.removeprefix("tp ").astype(int)
    sizes = sorted(tall["tensor ranks"].unique())
    published = {cell.size: cell.tp_size for cell in TRAINING_DAYS} | STUDY_TP_SIZES
    published = {f"gpt_{name.lower()}": size for name, size in published.items()}
    marked = tall[tall["tensor ranks"] == tall["model"].map(published)]
    with house_style():
        figure = page_figure("Each GPT fits on V100s at the paper's number of tensor ranks", 3.6)
        axis = figure.subplots()
        colors = sns.color_palette("viridis", 8)
        for (model, part), color in zip(tall.groupby("model", sort=False), colors, strict=False):
            axis.plot(part["tensor ranks"], part["GiB"], marker="o", markersize=4, color=color)
            ends, style = part[["tensor ranks", "GiB"]], {"textcoords": "offset points", "color": color}
            axis.annotate(model, ends.iloc[0], (-8, 0), ha="right", va="center", **style)
            if part["tensor ranks"].max() < sizes[-1]:
                heads = paper_models()[model].num_attention_heads
                text = f"{heads} heads are not\ndivisible by {sizes[-1]}"
                axis.annotate(text, ends.iloc[-1], (4, -3), va="top", **style)
        ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": "black"}
        axis.plot(marked["tensor ranks"], marked["GiB"], linestyle="none", label="the paper's tensor ranks", **ring)
        axis.legend(loc="lower left", frameon=False)
        axis.set_title(f"fp16, {MICRO_BATCH} sequences, full recomputation; dotted: GiB for tensors on each device")
        axis.set(xscale="log", yscale="log", xlabel="tensor ranks", ylabel="GiB per rank", xlim=(0.7, 8.3))
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_yticks([2, 4, 8, 16, 32, 64, 128], ["2", "4", "8", "16", "32", "64", "128"])
        axis.minorticks_off()
        for gib in devices.values():
            axis.hlines(gib, 1, 8.3, color=GREY, linewidth=0.8, linestyle=":")
        label_ends(axis, {f"{name}, {gib:.1f}": (1, gib, GREY) for name, gib in devices.items()})
    return figure
