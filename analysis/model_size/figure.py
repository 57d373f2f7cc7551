"""Figure 6, scaled down, from the record of `run.py`: loss against size, and perplexity over training."""

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from analysis.report.style import BLUE, GREY, house_style, page_figure

from .perplexity import draw_perplexity

PANELS = {"parameters_without_embeddings": "parameters without embeddings", "flops": "FLOPs of the training"}
LAWS = {"plain": ("--", "$a\\,x^{-b}$"), "floor": ("-", "$a\\,x^{-b} + c$")}


def read_sizes(record: dict[str, Any]) -> pd.DataFrame:
    """One row per size: `size` (layers x hidden), the measures of size, and the mean, lowest and highest loss."""
    metrics, names = record["metrics"], list(record["config"]["curves"])
    columns = (*PANELS, "parameters", "loss", "loss_lowest", "loss_highest")
    rows = [{"size": name} | {c: metrics[f"{name}/{c}"]["value"] for c in columns} for name in names]
    return pd.DataFrame(rows)


def draw_laws(record: dict[str, Any]) -> Figure:
    """Draw loss against parameters and against FLOPs on logarithmic axes, with the fitted power laws.

    Legends give the 95 % interval of b: from the residuals of the means for a law without a floor, over the seeds for
    a law with one.
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
    for kind, (style, form) in LAWS.items():
        if kind == "floor" and not record["config"]["floor_is_borne"][measure]:
            continue
        law = {
            key.split("/")[2]: m["value"]
            for key, m in record["metrics"].items()
            if key.startswith(f"{measure}/{kind}/")
        }
        a, b, c = law["a"], law["b"], law.get("c", 0.0)
        low, high = law.get("b_low", law["b_seeds_low"]), law.get("b_high", law["b_seeds_high"])
        words = f"{form}, b {low:.3f} to {high:.3f}" + (f", c {c:.2f}" if kind == "floor" else "")
        axis.plot(x, a * x**-b + c, style, color=GREY, linewidth=1.2, label=words)
    axis.set(xscale="log", yscale="log", xlabel=PANELS[measure])
    axis.yaxis.set_major_locator(LogLocator(subs=np.arange(1, 10, 0.2)))  # the axis spans less than a decade
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(subs=()))
    axis.set_ylim(top=axis.get_ylim()[1] * 1.02)  # space for the legend above the points
    axis.legend(frameon=False, loc="upper right")


def draw_model_sizes(record: dict[str, Any]) -> Figure:
    """Draw validation perplexity over training: one curve per size (the mean over its seeds), from narrow to wide."""
    curves = {}
    for name, points in record["config"]["curves"].items():
        table = pd.DataFrame(points).rename(columns={"step": "steps"})
        millions = record["metrics"][f"{name}/parameters"]["value"] / 1e6
        curves[f"{name}, {millions:.2f} M"] = table.assign(perplexity=np.exp(table.pop("loss")))
    return draw_perplexity(curves, title="Larger GPTs reach a lower validation perplexity on the same tokens")
