"""Figures of the norm-order study, for a column's width and readable in grey: line style tells the start, marker and
shade the order."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from .norm_order import NATS, choose_rates

_PALETTE = {"pre": "0.15", "post": "0.6"}
_STARTS = {True: "scaled by 1/sqrt(2 L)", False: "not scaled"}


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """The arm's two words as they stand in legends."""
    return rows.assign(start=rows["scaled"].map(_STARTS)).rename(columns={"order": "norm order"})


def _at_chosen_rates(rows: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> pd.DataFrame:
    rates = choose_rates(cells, factorial)
    return rows[[rates.get((row.order, row.scaled)) == row.lr for row in rows.itertuples()]]


def _one_legend(grid: sns.FacetGrid) -> Figure:
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.5, -0.16), ncols=3, title=None, frameon=False)
    return grid.figure


def draw_loss_curves(curves: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> Figure:
    """Training loss over steps, a panel a depth, each arm at its chosen learning rate; the band spans the seeds.

    Args:
        curves, cells: of `read_curves` and `read_cells`.
        factorial: the depth that chose the learning rates.
    """
    sns.set_theme(style="whitegrid", context="paper")
    rows = _named(_at_chosen_rates(curves, cells, factorial)).rename(columns={"loss": f"training loss, {NATS}"})
    grid = sns.relplot(
        rows,
        x="step",
        y=f"training loss, {NATS}",
        hue="norm order",
        style="start",
        col="layers",
        kind="line",
        palette=_PALETTE,
        errorbar=("pi", 100),
        height=2.6,
        aspect=0.95,
    )
    for axis in grid.axes.flat:
        axis.axhline(cells["context_free_loss"].iloc[0], color="0.4", linewidth=0.8, linestyle=":")
    grid.set_titles("{col_name} layers")
    return _one_legend(grid)


def draw_rates(cells: pd.DataFrame, factorial: int) -> Figure:
    """Last training loss over the learning rate at the depth of the factorial; the band spans the seeds."""
    sns.set_theme(style="whitegrid", context="paper")
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axis = figure.subplots()
    rows = _named(cells[cells["layers"] == factorial])
    look = {"hue": "norm order", "style": "start", "palette": _PALETTE, "markers": True, "errorbar": ("pi", 100)}
    sns.lineplot(rows, x="lr", y="train_loss", ax=axis, **look)
    axis.axhline(cells["context_free_loss"].iloc[0], color="0.4", linewidth=0.8, linestyle=":")
    axis.set(xscale="log", xlabel="learning rate", ylabel=f"training loss, {NATS}", title=f"{factorial} layers")
    axis.set_xticks(sorted(rows["lr"].unique()), [f"{rate:g}" for rate in sorted(rows["lr"].unique())])
    axis.minorticks_off()
    axis.legend(fontsize="small", frameon=False)
    return figure


def draw_gradient_norms(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> Figure:
    """Gradient norm of each layer at initialisation, a panel a depth; the band spans the seeds."""
    sns.set_theme(style="whitegrid", context="paper")
    first = norms[norms["step"] == 1]
    rows = _named(_at_chosen_rates(first, cells, factorial)).rename(columns={"norm": "gradient norm"})
    grid = sns.relplot(
        rows,
        x="layer",
        y="gradient norm",
        hue="norm order",
        style="start",
        col="layers",
        kind="line",
        palette=_PALETTE,
        errorbar=("pi", 100),
        height=2.6,
        aspect=0.95,
        facet_kws={"sharex": False},
    )
    grid.set(yscale="log")
    grid.set_titles("{col_name} layers, before the first step")
    return _one_legend(grid)
