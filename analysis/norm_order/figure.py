"""Figure 7 as a controlled experiment: colour shows the norm order; each initialization has its own row of panels."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.report.style import BLUE, FONT_SIZE, GREY, ORANGE, house_style, page_figure

from .cells import at_chosen_rates
from .run_folder import NATS

_ORDERS = {"pre": BLUE, "post": ORANGE}
_STARTS = {True: "scaled by 1/sqrt(2 L)", False: "not scaled"}
_LOSS = f"training loss, {NATS}"
_REFERENCES = {  # column of the cells: name, line style
    "scored_entropy": ("unigram entropy", ":"),
    "context_free_loss": ("best without context", (0, (6, 2))),
}


def draw_loss_curves(curves: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> Figure:
    """Draw training loss over steps: one panel per initialization and depth, one line per seed.

    Each arm has the learning rate chosen for it.

    Args:
        curves, cells: results of `read_curves` and `read_cells`.
        factorial: depth at which the learning rates were chosen.
    """
    runs = at_chosen_rates(cells, cells, factorial)
    rows = at_chosen_rates(curves, cells, factorial)
    counts = [f"{name}: {_learned(runs[runs['scaled'] == scaled])}" for scaled, name in _STARTS.items()]
    title = f"Runs that learned, initialization {'; '.join(counts)}"
    figure = _panels(rows, cells, title, by_start=True)
    depths = sorted(runs["layers"].unique())
    parts = [runs[(runs["scaled"] == start) & (runs["layers"] == layers)] for start in _STARTS for layers in depths]
    for axis, part in zip(figure.axes, parts, strict=True):
        for place, (words, color) in enumerate(zip(_learned(part).split(", "), _ORDERS.values(), strict=True)):
            style = {"transform": axis.transAxes, "ha": "right", "va": "top", "fontsize": FONT_SIZE}
            axis.text(0.98, 0.97 - 0.1 * place, words, color=color, **style)
    return figure


def _learned(cells: pd.DataFrame) -> str:
    """Count the runs that learned, per norm order."""
    states = [(order, cells.loc[cells["order"] == order, "state"]) for order in ("pre", "post")]
    return ", ".join(f"{order}-norm {sum(of == 'learned')} of {len(of)}" for order, of in states)


def draw_true_widths(curves: pd.DataFrame, cells: pd.DataFrame) -> Figure:
    """Draw the training loss of BERT 336M and 752M over steps: one panel per model, one line per norm order and seed.

    Args:
        curves, cells: results of `read_curves` and `read_cells` for records of `true_widths.py`.
    """
    return _panels(curves, cells, "BERT 336M and 752M at their true widths, 2,000 steps")


def _panels(rows: pd.DataFrame, cells: pd.DataFrame, title: str, by_start: bool = False) -> Figure:
    """Draw one line of loss over step per run: a panel per number of layers, a colour per norm order.

    Args:
        cells: with the reference losses.
        by_start: one row of panels per initialization.
    """
    depths, starts = sorted(rows["layers"].unique()), list(_STARTS) if by_start else [None]
    with house_style():
        figure = page_figure(title, 0.8 + 2.6 * len(starts))
        axes = figure.subplots(len(starts), len(depths), squeeze=False, sharex=True, sharey=True)
        for line, start in zip(axes, starts, strict=True):
            for axis, layers in zip(line, depths, strict=True):
                part = rows[(rows["layers"] == layers) & (True if start is None else rows["scaled"] == start)]
                for (order, *_), run in part.groupby(["order", "scaled", "lr", "seed"]):
                    axis.plot(run["step"], run["loss"], color=_ORDERS[order], linewidth=1)
                for column, (_, style) in _REFERENCES.items():
                    axis.axhline(cells[column].dropna().iloc[0], color=GREY, linewidth=0.9, linestyle=style)
            line[0].set_ylabel(_LOSS if start is None else f"initialization {_STARTS[start]}\n{_LOSS}")
        for top, bottom, layers in zip(axes[0], axes[-1], depths, strict=True):
            top.set_title(f"{layers} layers")
            bottom.set_xlabel("step")
        handles = [Line2D([], [], color=color, label=f"{order}-norm") for order, color in _ORDERS.items()]
        handles += [Line2D([], [], color=GREY, linewidth=0.9, linestyle=s, label=n) for n, s in _REFERENCES.values()]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.8, columnspacing=1.4
        )
    return figure
