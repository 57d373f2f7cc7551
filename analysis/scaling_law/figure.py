"""The figures of scaling sweeps, from the tables of `cells`, `transfer` and `decide`."""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report.style import BLUE, GREEN, GREY, ORANGE, PINK, house_style, page_figure

from .cells import learned_means
from .law import fit_surface
from .transfer import CONDITION, transfer

WIDTH, DEPTH = "hidden_size", "num_layers"
SIZES = {WIDTH: "width", DEPTH: "layers"}
PLACEMENTS = {"pre": "pre-norm", "post": "post-norm", "peri": "Peri-LN"}
PARAMETRIZATIONS = {  # name and colour
    "standard": ("standard", BLUE),
    "mup": ("muP", ORANGE),
    "completep": ("CompleteP", GREEN),
    "completep_unpublished": ("CompleteP's rules (published for pre-norm)", PINK),
}
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
            "Validation loss of GPTs over the learning rate, by width and depth. Points are seeds, lines their "
            "means where all learn",
            draw_rates(cells[usual & pre_norm], "Under standard the best rate falls with width, under muP it stays"),
        ),
        "shifts": (
            "How far the best learning rate moves from that of the base, 4 layers x 64, with the range "
            "over three seeds",
            draw_shifts(
                transfer(cells),
                "Four times the width: the best rate falls 1.6 to 2 octaves, under muP at most 0.4",
            ),
        ),
        "sensitivity": (
            "Validation loss of a GPT of 4 layers x 64 over the learning rate, by placement. Points are seeds, "
            "lines their means where all learn",
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

    Points are seeds and lines their means where all have learned; the larger the size, the darker. The smallest size
    stands in every panel.
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
            _draw_lines(axis, dict(list(pd.concat([smallest, runs]).groupby(key))), SIZES[key])
            axis.set_title(f"{PARAMETRIZATIONS[arm][0]}, by {SIZES[key]}", loc="left")
        for axis in axes[:, 0]:
            axis.set_ylabel("validation loss (nats/token)")
    return figure


def _draw_lines(axis: Axes, lines: dict[object, pd.DataFrame], title: str) -> None:
    colors = [colormaps["viridis"](0.75 - 0.75 * i / max(len(lines) - 1, 1)) for i in range(len(lines))]
    for (label, runs), color in zip(lines.items(), colors, strict=True):
        means = learned_means(runs)
        axis.plot(means.index, means, color=color, linewidth=1.2, label=str(label))
        axis.plot(runs["lr"], runs["loss"], "o", color=color, markersize=3, alpha=0.7)
    axis.set(xscale="log", xlabel="peak learning rate")
    axis.legend(title=title, frameon=False)


def draw_shifts(table: pd.DataFrame, title: str) -> Figure:
    """Draw the shift of every condition of `transfer` with the range over its seeds, by placement and then by size."""
    order = {"family": False, "norm_order": False, "qk_norm": True, "num_layers": True, "hidden_size": True}
    order |= {"parametrization": False}  # in the order of `PARAMETRIZATIONS`, and pre-norm before post-norm
    table = table.dropna(subset="shift").sort_index(level=list(order), ascending=list(order.values()))
    groups = table.groupby(level=CONDITION[:3], sort=False).ngroup()
    table = table.assign(place=-np.arange(len(table)) - 0.7 * groups)
    with house_style():
        figure = page_figure(title, 1.0 + 0.24 * len(table))
        axis = figure.subplots()
        axis.axvspan(-1, 1, color=GREY, alpha=0.15, linewidth=0, label="within one octave")
        axis.axvline(0, color=GREY, linewidth=0.8)
        for name, (label, color) in PARAMETRIZATIONS.items():
            rows = table[table.index.get_level_values("parametrization") == name]
            if len(rows):
                errors = [rows["shift"] - rows["least"], rows["most"] - rows["shift"]]
                style = {"fmt": "o", "color": color, "markersize": 4.5, "capsize": 2.5, "label": label}
                axis.errorbar(rows["shift"], rows["place"], xerr=errors, **style)
        axis.set_yticks(table["place"], [_condition(index) for index in table.index])
        axis.set_xlabel("octaves from the best learning rate of the smallest size")
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure


def _condition(index: tuple) -> str:
    family, norm_order, qk_norm, parametrization, layers, width, *_ = index
    arm = f"{family.upper()}, {PLACEMENTS[norm_order]}{', QK-norm' * qk_norm}"
    return f"{arm}, {layers} layers x {width}, {PARAMETRIZATIONS[parametrization][0].partition(' (')[0]}"


def draw_sensitivity(cells: pd.DataFrame, title: str) -> Figure:
    """Draw loss over rate of one size, a line per placement; dashed with QK-norm.

    Points are seeds and lines their means where all have learned.
    A loss above that of a unigram model is drawn as that.
    """
    cells = cells.assign(loss=cells["loss"].fillna(np.inf).clip(upper=cells["unigram"]))
    cells = cells.sort_values(["norm_order", "qk_norm"], ascending=[False, True])
    orders = cells["norm_order"].unique()
    colors = dict(zip(orders, (BLUE, ORANGE, GREEN), strict=False))
    with house_style():
        figure = page_figure(title, 3.4)
        axis = figure.subplots()
        for (order, qk_norm), runs in cells.groupby(["norm_order", "qk_norm"], sort=False):
            style = {"color": colors[order], "linestyle": "--" if qk_norm else "-", "linewidth": 1.2}
            means = learned_means(runs)
            axis.plot(means.index, means, label=f"{PLACEMENTS[order]}{', QK-norm' * qk_norm}", **style)
            axis.plot(runs["lr"], runs["loss"], "o", color=colors[order], markersize=3, alpha=0.5)
        axis.axhline(cells["unigram"].iloc[0], color=GREY, linestyle=":", linewidth=1, label="unigram model")
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
