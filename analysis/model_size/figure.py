"""Figure 6, from the record of `decide.py`: validation perplexity over training, and loss against size."""

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from analysis.report.style import BLUE, GREY, house_style, label_ends, page_figure

PANELS = {"parameters_without_embeddings": "parameters without embeddings", "flops": "FLOPs of the training"}


def read_sizes(record: dict[str, Any]) -> pd.DataFrame:
    """One row per size: `size` (layers x hidden), the measures of size, and the mean, lowest and highest loss."""
    metrics, names = record["metrics"], list(record["config"]["curves"])
    columns = (*PANELS, "parameters", "loss", "loss_lowest", "loss_highest")
    rows = [{"size": name} | {c: metrics[f"{name}/{c}"]["value"] for c in columns} for name in names]
    return pd.DataFrame(rows)


def draw_laws(record: dict[str, Any]) -> Figure:
    """Draw loss against parameters and against FLOPs on logarithmic axes, with the fitted power laws.

    Legends give the 95 % interval of b from the residuals of the means.
    """
    with house_style():
        figure = page_figure("A power law misses the widest model: its loss falls faster", 3.4)
        for axis, measure in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
            _draw_panel(axis, record, read_sizes(record), measure)
        figure.axes[0].set_ylabel("validation loss (nats/token)")
        sns.despine(figure)
    return figure


def _draw_panel(axis: Axes, record: dict[str, Any], rows: pd.DataFrame, measure: str) -> None:
    bars = [rows["loss"] - rows["loss_lowest"], rows["loss_highest"] - rows["loss"]]
    label = f"mean and range of {len(record['config']['seeds'])} seeds"
    axis.errorbar(rows[measure], rows["loss"], bars, fmt="o", color=BLUE, markersize=4.5, capsize=2.5, label=label)
    x = np.geomspace(rows[measure].min() / 1.3, rows[measure].max() * 1.3, 100)
    a, b, low, high = (record["metrics"][f"{measure}/plain/{name}"]["value"] for name in ("a", "b", "b_low", "b_high"))
    axis.plot(x, a * x**-b, "--", color=GREY, linewidth=1.2, label=f"$a\\,x^{{-b}}$, b {low:.3f} to {high:.3f}")
    axis.set(xscale="log", yscale="log", xlabel=PANELS[measure])
    axis.yaxis.set_major_locator(LogLocator(subs=np.arange(1, 10, 0.2)))  # the axis spans less than a decade
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(subs=()))
    axis.set_ylim(top=axis.get_ylim()[1] * 1.02)  # space for the legend above the points
    axis.legend(frameon=False, loc="upper right")


def draw_model_sizes(record: dict[str, Any]) -> Figure:
    """Draw validation perplexity over training: one curve per size (the mean over its seeds), from narrow to wide.

    They differ in marker, dash pattern and lightness; the widest is the darkest.
    """
    curves = {}
    for name, points in record["config"]["curves"].items():
        table = pd.DataFrame(points)
        millions = record["metrics"][f"{name}/parameters"]["value"] / 1e6
        curves[f"{name}, {millions:.2f} M"] = table.assign(perplexity=np.exp(table.pop("loss")))
    rows = pd.concat([points.assign(run=label) for label, points in curves.items()], ignore_index=True)
    colors = [colormaps["viridis"](0.6 - 0.6 * i / max(len(curves) - 1, 1)) for i in range(len(curves))]
    with house_style():
        figure = page_figure("Larger GPTs reach a lower validation perplexity on the same tokens", 3.6)
        axis = figure.subplots()
        sns.lineplot(
            rows,
            x="step",
            y="perplexity",
            hue="run",
            style="run",
            markers=True,
            palette=colors,
            errorbar=None,
            markersize=5,
            markevery=0.1,  # of the curve's length
            legend=False,
            ax=axis,
        )
        axis.set(xlabel="iterations", ylabel="validation perplexity, log scale", yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        last = [points[["step", "perplexity"]].iloc[-1] for points in curves.values()]
        label_ends(axis, {label: (*end, color) for label, end, color in zip(curves, last, colors, strict=True)})
        sns.despine(figure)
    return figure
