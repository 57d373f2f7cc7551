"""Figure 7 as a controlled experiment: lightness tells the order, line style how the weights before residuals start."""

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from ..norm_order import NATS, choose_rates
from .style import PALETTE, column_style

_PALETTE = {"pre": PALETTE["paper"], "post": PALETTE["ours"]}
_STARTS = {True: "scaled by 1/sqrt(2 L)", False: "not scaled"}
_LOSS = f"training loss, {NATS}"


def draw_loss_curves(curves: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> Figure:
    """Training loss over steps, a panel a depth, each arm at its chosen learning rate; the band spans the seeds.

    Args:
        curves, cells: of `read_curves` and `read_cells`.
        factorial: the depth that chose the learning rates.
    """
    rows = _arms(_at_chosen_rates(curves, cells, factorial)).rename(columns={"loss": _LOSS})
    figure = _panels(rows, x="step", y=_LOSS, title="{col_name} layers")
    for axis in figure.axes:
        _mark_context_free(axis, cells)
    return figure


def draw_rates(cells: pd.DataFrame, factorial: int) -> Figure:
    """Last training loss over the learning rate at the depth of the factorial, a panel a start; marks are seeds."""
    rows = _arms(cells[cells["layers"] == factorial]).rename(columns={"lr": "learning rate", "train_loss": _LOSS})
    rates = sorted(rows["learning rate"].unique())
    figure = _panels(
        rows, x="learning rate", y=_LOSS, col="start", title=f"{factorial} layers, {{col_name}}", style="norm order"
    )
    for axis, (_, part) in zip(figure.axes, rows.groupby("start", sort=False), strict=True):
        for order, cells_of in part.groupby("norm order"):
            axis.scatter(cells_of["learning rate"], cells_of[_LOSS], color=_PALETTE[order], s=9, zorder=3)
        _mark_context_free(axis, cells)
        axis.set(xscale="log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
    return figure


def draw_gradient_norms(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int, step: int = 1) -> Figure:
    """Gradient norm of each layer, a panel a depth, each arm at its chosen learning rate; the band spans the seeds.

    Args:
        norms: of `read_gradient_norms`.
        step: 1, before the first update, or another at which the study keeps norms: then the mean of 10 steps up to it.
    """
    at_step = norms[norms["step"] == step].rename(columns={"norm": "gradient norm"})
    rows = _arms(_at_chosen_rates(at_step, cells, factorial))
    return _panels(rows, x="layer", y="gradient norm", title="{col_name} layers", yscale="log", share_x=False)


def _arms(rows: pd.DataFrame) -> pd.DataFrame:
    """The arm's two words as they stand in legends."""
    return rows.assign(start=rows["scaled"].map(_STARTS)).rename(columns={"order": "norm order"})


def _at_chosen_rates(rows: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    rates = choose_rates(cells, factorial)
    return rows[[rates.get((row.order, row.scaled)) == row.lr for row in rows.itertuples()]]


def _panels(
    rows: pd.DataFrame,
    x: str,
    y: str,
    title: str,
    col: str = "layers",
    style: str = "start",
    yscale: str = "linear",
    share_x: bool = True,
) -> Figure:
    """A row of panels, by default one a depth, with one legend below them; bands span the seeds."""
    arms = {"hue": "norm order", "style": style, "palette": _PALETTE, "errorbar": ("pi", 100)}
    size = {"height": 2.2, "aspect": 0.9 if col == "layers" else 1.3}
    with column_style():
        grid = sns.relplot(rows, x=x, y=y, col=col, kind="line", facet_kws={"sharex": share_x}, **arms, **size)
        grid.set(yscale=yscale)
        grid.set_titles(title)
        sns.move_legend(
            grid, "upper center", bbox_to_anchor=(0.5, 0.02), ncols=6, frameon=False, title_fontsize="medium"
        )
    plt.close(grid.figure)  # a notebook would show it twice
    return grid.figure


def _mark_context_free(axis: plt.Axes, cells: pd.DataFrame) -> None:
    axis.axhline(cells["context_free_loss"].dropna().iloc[0], color="0.4", linewidth=0.8, linestyle=":")
