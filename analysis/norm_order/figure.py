"""Figure 7 as a controlled experiment: lightness tells the order, line style how the weights before residuals start."""

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.report.style import COLUMN_WIDTH, PALETTE, column_style

from .cells import CELL, NATS, at_chosen_rates

_PALETTE = {"pre": PALETTE["paper"], "post": PALETTE["ours"]}
_STARTS = {True: "scaled by 1/sqrt(2 L)", False: "not scaled"}
_LOSS = f"training loss,\n{NATS}"
_NORM = "gradient norm,\nnats a unit of weight"


def draw_loss_curves(curves: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> Figure:
    """Training loss over steps, one panel per depth, each arm at its chosen learning rate; a line is a seed.

    Args:
        curves, cells: of `read_curves` and `read_cells`.
        factorial: the depth that chose the learning rates.
    """
    rows = _arms(at_chosen_rates(curves, cells, factorial)).rename(columns={"loss": _LOSS})
    figure = _panels(rows, x="step", y=_LOSS, title="{col_name} layers")
    for axis in figure.axes:
        _mark_references(axis, cells)
    return figure


def draw_rates(cells: pd.DataFrame, factorial: int) -> Figure:
    """Last training loss over the learning rate at the factorial's depth, one panel per start; a mark is a seed."""
    rows = _arms(cells[cells["layers"] == factorial]).rename(columns={"lr": "learning rate", "train_loss": _LOSS})
    rates = sorted(rows["learning rate"].unique())
    figure = _panels(rows, x="learning rate", y=_LOSS, col="start", title="{col_name}")
    for axis, (_, part) in zip(figure.axes, rows.groupby("start", sort=False), strict=True):
        for order, cells_of in part.groupby("norm order"):
            axis.scatter(cells_of["learning rate"], cells_of[_LOSS], color=_PALETTE[order], s=9, zorder=3)
        _mark_references(axis, cells)
        axis.set(xscale="log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
    return figure


def draw_gradient_norms(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int, step: int = 1) -> Figure:
    """Gradient norm of each layer, one panel per depth, each arm at its chosen learning rate; a line is a seed.

    Args:
        norms: of `read_gradient_norms`.
        step: 1, before the first update, or another at which the study keeps norms: then the mean of 10 steps up to it.
    """
    at_step = norms[norms["step"] == step].rename(columns={"norm": _NORM})
    rows = _arms(at_chosen_rates(at_step, cells, factorial))
    figure = _panels(rows, x="layer", y=_NORM, title="{col_name} layers", share_x=False)
    _logarithmic(figure)
    return figure


def draw_failures(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int, steps: tuple[int, int]) -> Figure:
    """Gradient norm of each layer in every post-norm run of the factorial, before the first update and later.

    Args:
        norms: of `read_gradient_norms`.
        steps: of the two panels.
    """
    rows = norms.merge(cells[[*CELL, "state"]], on=CELL).rename(columns={"norm": _NORM, "state": "the run"})
    rows = rows[(rows["layers"] == factorial) & (rows["order"] == "post") & rows["step"].isin(steps)]
    rows = rows.assign(run=rows["scaled"].astype(str) + rows["lr"].astype(str) + rows["seed"].astype(str))
    shown = {"hue": "the run", "style": "the run", "palette": {"learned": "0.65", "stuck": "0.15", "diverged": "0.15"}}
    figure = _panels(rows, x="layer", y=_NORM, col="step", title="step {col_name}", units="run", **shown)
    _logarithmic(figure)
    return figure


def _arms(rows: pd.DataFrame) -> pd.DataFrame:
    """The arm's two words as they stand in legends."""
    return rows.assign(start=rows["scaled"].map(_STARTS)).rename(columns={"order": "norm order"})


def _panels(
    rows: pd.DataFrame, x: str, y: str, title: str, col: str = "layers", share_x: bool = True, **shown
) -> Figure:
    """Two panels per row at column width, one legend below them; by default lightness is the order, style the start."""
    arms = {"hue": "norm order", "style": "start" if col != "start" else None, "palette": _PALETTE}
    lines = {"units": "seed", "estimator": None, "linewidth": 0.9} | arms | shown
    if col == "start":  # a mean over the seeds, which are marks
        lines |= {"units": None, "estimator": "mean", "errorbar": None}
    size = {"height": COLUMN_WIDTH * 0.55, "aspect": 0.95, "col_wrap": 2}
    facets = {"sharex": share_x, "legend_out": False}
    with column_style():
        grid = sns.relplot(rows, x=x, y=y, col=col, kind="line", facet_kws=facets, **lines, **size)
        grid.set_titles(title)
        sns.move_legend(
            grid, "upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, frameon=False, title_fontsize="small"
        )
    plt.close(grid.figure)  # a notebook would show it twice
    return grid.figure


def _logarithmic(figure: Figure) -> None:
    """A logarithmic y axis with numbers at 1 and 3 of a decade, or at decades where there are many."""
    for axis in figure.axes:
        axis.set(yscale="log")
        low, high = axis.get_ylim()
        if high / low < 1e3:
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def _mark_references(axis: plt.Axes, cells: pd.DataFrame) -> None:
    """Dotted, a model that ignores its input; dashed, the least loss without a look at other places."""
    for name, style in (("scored_entropy", ":"), ("context_free_loss", (0, (6, 2)))):
        axis.axhline(cells[name].dropna().iloc[0], color="0.4", linewidth=0.8, linestyle=style)
