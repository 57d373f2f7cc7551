"""Figure 6: validation perplexity over training, one curve per run."""

import pandas as pd
import seaborn as sns
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from analysis.report.style import house_style, label_ends, page_figure

AXES = {"steps": "iterations", "tokens": "tokens"}


def draw_perplexity(
    curves: dict[str, pd.DataFrame], x: str = "steps", title: str = "Validation perplexity over training"
) -> Figure:
    """Draw all curves on one axis. They differ in marker, dash pattern and lightness; the last one is the darkest.

    Args:
        curves: data frame by label, with columns `perplexity` and `x`.
        x: `steps` or `tokens`.
    """
    rows = pd.concat([points.assign(run=label) for label, points in curves.items()], ignore_index=True)
    colors = [colormaps["viridis"](0.6 - 0.6 * i / max(len(curves) - 1, 1)) for i in range(len(curves))]
    shortest = min(map(len, curves.values()))
    with house_style():
        figure = page_figure(title, 3.6)
        axis = figure.subplots()
        sns.lineplot(
            rows,
            x=x,
            y="perplexity",
            hue="run",
            style="run",
            markers=True,
            palette=colors,
            errorbar=None,
            markersize=5,
            markevery=0.1 if shortest > 10 else 1,  # as a fraction of the curve's length; of one point it shows none
            legend=False,
            ax=axis,
        )
        axis.set(xlabel=AXES[x], ylabel="validation perplexity, log scale", yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        last = [points[[x, "perplexity"]].iloc[-1] for points in curves.values()]
        label_ends(axis, {label: (*end, color) for label, end, color in zip(curves, last, colors, strict=True)})
        sns.despine(figure)
    return figure
