"""The figures of scaling sweeps, from the tables of `cells`, `transfer` and `decide`."""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report.style import BLUE, GREY, ORANGE, house_style, page_figure

from .cells import mean_losses
from .law import fit_surface
from .transfer import transfer

WIDTH, DEPTH = "hidden_size", "num_layers"
STEPS_TOKENS = 614_400  # of every run of the study but those of its law


def study_figures(cells: pd.DataFrame) -> dict[str, tuple[str, Figure]]:
    """Caption and drawing by name of the study's figures.

    Args:
        cells: of `cells.tabulate`.
    """
    usual = cells["tokens"] == STEPS_TOKENS
    pre_norm = (cells["family"] == "gpt") & (cells["norm_order"] == "pre") & ~cells["qk_norm"]
    base = (cells["family"] == "gpt") & (cells["parametrization"] == "standard") & (cells["parameters"] < 250_000)
    return {
        "rates": (
            "Validation loss of GPTs over the learning rate, by width and depth. Points are seeds, lines their means",
            draw_rates(cells[usual & pre_norm], "Under standard the best rate falls with width, under muP it stays"),
        ),
        "shifts": (
            "How far the best learning rate moves from that of the base, 4 layers x 64, with 95 % intervals",
            draw_shifts(
                transfer(cells),
                "Four times the width: the best rate falls 1.6 to 2 octaves, under muP at most 0.4",
            ),
        ),
        "sensitivity": (
            "Validation loss of a GPT of 4 layers x 64 over the learning rate, by placement; dotted: a unigram model",
            draw_sensitivity(cells[usual & base], "Peri-LN loses least at too high rates, post-norm most"),
        ),
        "law": (
            "Loss over parameters and tokens under muP at the base's rate. Points are seeds, lines the law",
            draw_law(
                cells[pre_norm & ~usual],
                "From width 64 on the second doubling of the tokens gains more than the first",
            ),
        ),
    }


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
    return figure


def _draw_lines(axis: Axes, lines: dict[object, pd.DataFrame], title: str) -> None:
    colors = [colormaps["viridis"](0.75 - 0.75 * i / max(len(lines) - 1, 1)) for i in range(len(lines))]
    for (label, runs), color in zip(lines.items(), colors, strict=True):
        means = mean_losses(runs)
        axis.plot(means.index, means, color=color, linewidth=1.2, label=str(label))
        axis.plot(runs["lr"], runs["loss"], "o", color=color, markersize=3, alpha=0.7)
    axis.set(xscale="log", xlabel="peak learning rate")
    axis.legend(title=title, frameon=False)


def draw_shifts(table: pd.DataFrame, title: str) -> Figure:
    """Draw the shift of every condition of `transfer` with its interval; the band is one octave either way."""
    table = table.dropna(subset="shift")
    with house_style():
        figure = page_figure(title, 1.0 + 0.24 * len(table))
        axis = figure.subplots()
        axis.axvspan(-1, 1, color=GREY, alpha=0.15, linewidth=0)
        axis.axvline(0, color=GREY, linewidth=0.8)
        places = range(len(table))[::-1]
        errors = [table["shift"] - table["low"], table["high"] - table["shift"]]
        axis.errorbar(table["shift"], places, xerr=errors, fmt="o", color=BLUE, markersize=4.5, capsize=2.5)
        axis.set_yticks(places, [_condition(index) for index in table.index])
        axis.set_xlabel("octaves from the best learning rate of the smallest size")
    return figure


def _condition(index: tuple) -> str:
    family, norm_order, qk_norm, parametrization, layers, width, *_ = index
    return f"{family}, {norm_order}{', QK-norm' * qk_norm}, {parametrization}, {layers} x {width}"


def draw_sensitivity(cells: pd.DataFrame, title: str) -> Figure:
    """Draw loss over rate of one size, a line per placement; dashed with QK-norm. Points are seeds.

    A loss above that of a unigram model is drawn as that.
    """
    cells = cells.assign(loss=cells["loss"].fillna(np.inf).clip(upper=cells["unigram"]))
    orders = cells["norm_order"].unique()
    colors = dict(zip(orders, (BLUE, ORANGE, "#029e73"), strict=False))
    with house_style():
        figure = page_figure(title, 3.4)
        axis = figure.subplots()
        for (order, qk_norm), runs in cells.groupby(["norm_order", "qk_norm"], sort=False):
            style = {"color": colors[order], "linestyle": "--" if qk_norm else "-", "linewidth": 1.2}
            means = mean_losses(runs)
            axis.plot(means.index, means, label=f"{order}{', QK-norm' * qk_norm}", **style)
            axis.plot(runs["lr"], runs["loss"], "o", color=colors[order], markersize=3, alpha=0.5)
        axis.axhline(cells["unigram"].iloc[0], color=GREY, linestyle=":", linewidth=1)
        axis.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss (nats/token)")
        axis.legend(frameon=False)
    return figure


def draw_law(cells: pd.DataFrame, title: str) -> Figure:
    """Draw loss over the number of parameters, a line per number of tokens: the law, and the runs."""
    law = fit_surface(cells["parameters"], cells["tokens"], cells["loss"])
    sizes = np.geomspace(cells["parameters"].min(), cells["parameters"].max(), 100)
    with house_style():
        figure = page_figure(title, 3.2)
        axis = figure.subplots()
        groups = list(cells.groupby("tokens"))
        for i, (tokens, runs) in enumerate(groups):
            color = colormaps["viridis"](0.75 - 0.75 * i / max(len(groups) - 1, 1))
            axis.plot(sizes, law(sizes, tokens), color=color, linewidth=1.2, label=f"{tokens / 1e6:.2f} M tokens")
            axis.plot(runs["parameters"], runs["loss"], "o", color=color, markersize=3, alpha=0.7)
        axis.set(xscale="log", xlabel="parameters", ylabel="validation loss (nats/token)")
        axis.legend(frameon=False)
    return figure
