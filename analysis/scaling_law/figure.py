"""The figure of a scaling sweep: loss over the learning rate."""

import pandas as pd
import seaborn as sns
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report.style import house_style, page_figure

from .cells import mean_losses

WIDTH, DEPTH = "hidden_size", "num_layers"


def check_one_panel(cells: pd.DataFrame) -> None:
    """Refuse runs that `draw_rates` cannot tell apart.

    Raises:
        ValueError: they are of several families, placements or numbers of tokens, or of one size.
    """
    for name in ("family", "norm_order", "qk_norm", "tokens"):
        if len(found := cells[name].unique()) > 1:
            raise ValueError(f"`--figure` needs runs of one {name}, but they have {', '.join(map(str, found))}")
    if len(cells["parameters"].unique()) == 1:
        raise ValueError("`--figure` needs runs of two sizes at least, but they have one")


def draw_rates(cells: pd.DataFrame, title: str) -> Figure:
    """Draw loss over rate for the parametrizations of one family and placement: the upper row over width, the lower
    over depth.

    Points are seeds and lines their means; the larger the size, the darker. The smallest size stands in every panel.
    """
    smallest = cells[cells["parameters"] == cells["parameters"].min()]
    others = cells[cells["parameters"] > cells["parameters"].min()]
    deeper = others[DEPTH] > smallest[DEPTH].iloc[0]
    rows = [(key, part) for key, part in ((WIDTH, others[~deeper]), (DEPTH, others[deeper])) if len(part)]
    arms = [(key, arm, runs) for key, part in rows for arm, runs in list(part.groupby("parametrization"))[::-1]]
    with house_style():
        figure = page_figure(title, 0.5 + 2.6 * -(-len(arms) // 2))
        axes = figure.subplots(-(-len(arms) // 2), 2, sharex=True, sharey=True, squeeze=False)
        for axis, (key, arm, runs) in zip(axes.flat, arms, strict=False):
            _draw_lines(axis, dict(list(pd.concat([smallest, runs]).groupby(key))), key.replace("_", " "))
            axis.set_title(f"{arm}, by {key.replace('_', ' ')}", loc="left")
        for axis in axes[:, 0]:
            axis.set_ylabel("validation loss (nats/token)")
        sns.despine(figure)
    return figure


def _draw_lines(axis: Axes, lines: dict[object, pd.DataFrame], title: str) -> None:
    colors = [colormaps["viridis"](0.75 - 0.75 * i / max(len(lines) - 1, 1)) for i in range(len(lines))]
    for (label, runs), color in zip(lines.items(), colors, strict=True):
        means = mean_losses(runs)
        axis.plot(means.index, means, color=color, linewidth=1.2, label=str(label))
        axis.plot(runs["lr"], runs["loss"], "o", color=color, markersize=3, alpha=0.7)
    axis.set(xscale="log", xlabel="peak learning rate")
    axis.legend(title=title, frameon=False)
