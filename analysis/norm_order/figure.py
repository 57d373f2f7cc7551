"""Figure 7 as a controlled experiment: colour shows the norm order, line style the initialization."""

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.report.style import BLUE, COLUMN_WIDTH, FONT_SIZE, ORANGE, PAGE_WIDTH, column_style

from .cells import CELL, at_chosen_rates
from .run_folder import NATS

_PALETTE = {"pre": BLUE, "post": ORANGE}
_STARTS = {True: "scaled by 1/sqrt(2 L)", False: "not scaled"}
_LOSS = f"training loss,\n{NATS}"
_NORM = "gradient norm,\nnats per unit weight"


def draw_loss_curves(curves: pd.DataFrame, cells: pd.DataFrame, factorial: int) -> Figure:
    """Draw training loss over steps: one panel per depth, one line per seed, each arm at its chosen learning rate.

    Args:
        curves, cells: results of `read_curves` and `read_cells`.
        factorial: depth at which the learning rates were chosen.
    """
    rows = _arms(at_chosen_rates(curves, cells, factorial)).rename(columns={"loss": _LOSS})
    figure = _panels(rows, x="step", y=_LOSS, title="{col_name} layers", columns=4)
    runs = at_chosen_rates(cells, cells, factorial)
    for axis, (layers, part) in zip(figure.axes, runs.groupby("layers"), strict=True):
        _mark_references(axis, cells)
        axis.set_title(f"{layers} layers", fontsize=FONT_SIZE)
        count = _learned(part).replace(", ", "\n")
        axis.text(0.97, 0.96, count, transform=axis.transAxes, ha="right", va="top", fontsize=FONT_SIZE - 1)
    title = f"Runs that learned: {_learned(runs)}"
    figure.suptitle(title, x=0.01, y=1.04, ha="left", weight="bold", fontsize=FONT_SIZE + 2)
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
    rows = curves.rename(columns={"order": "norm order", "loss": _LOSS})
    figure = _panels(rows, x="step", y=_LOSS, title="{col_name} layers", style=None)
    for axis in figure.axes:
        _mark_references(axis, cells)
    return figure


def draw_rates(cells: pd.DataFrame, factorial: int) -> Figure:
    """Draw final training loss over learning rate at the factorial's depth: one panel per initialization."""
    rows = _arms(cells[cells["layers"] == factorial]).rename(columns={"lr": "learning rate", "train_loss": _LOSS})
    rates = sorted(rows["learning rate"].unique())
    figure = _panels(rows, x="learning rate", y=_LOSS, col="initialization", title="{col_name}")
    for axis, (_, part) in zip(figure.axes, rows.groupby("initialization", sort=False), strict=True):
        for order, cells_of in part.groupby("norm order"):
            axis.scatter(cells_of["learning rate"], cells_of[_LOSS], color=_PALETTE[order], s=9, zorder=3)
        _mark_references(axis, cells)
        axis.set(xscale="log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
    return figure


def draw_gradient_norms(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int, step: int = 1) -> Figure:
    """Draw the gradient norm per layer: one panel per depth, one line per seed, each arm at its chosen learning rate.

    Args:
        norms: result of `read_gradient_norms`.
        step: 1 (before the first update), or another step with recorded norms, which are means over the last 10 steps.
    """
    at_step = norms[norms["step"] == step].rename(columns={"norm": _NORM})
    rows = _arms(at_chosen_rates(at_step, cells, factorial))
    figure = _panels(rows, x="layer", y=_NORM, title="{col_name} layers", share_x=False)
    _logarithmic(figure)
    return figure


def draw_failures(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int, steps: tuple[int, int]) -> Figure:
    """Draw the gradient norm per layer of every post-norm run of the factorial, before the first update and later.

    Args:
        norms: result of `read_gradient_norms`.
        steps: the two panels' steps.
    """
    rows = norms.merge(cells[[*CELL, "state"]], on=CELL).rename(columns={"norm": _NORM, "state": "the run"})
    rows = rows[(rows["layers"] == factorial) & (rows["order"] == "post") & rows["step"].isin(steps)]
    rows = rows.assign(run=rows["scaled"].astype(str) + rows["lr"].astype(str) + rows["seed"].astype(str))
    shown = {"hue": "the run", "style": "the run", "palette": {"learned": BLUE, "stuck": ORANGE, "diverged": ORANGE}}
    figure = _panels(rows, x="layer", y=_NORM, col="step", title="step {col_name}", units="run", **shown)
    _logarithmic(figure)
    return figure


def _arms(rows: pd.DataFrame) -> pd.DataFrame:
    """Rename the two factors of an arm for legends."""
    return rows.assign(initialization=rows["scaled"].map(_STARTS)).rename(columns={"order": "norm order"})


def _panels(
    rows: pd.DataFrame, x: str, y: str, title: str, col: str = "layers", share_x: bool = True, columns: int = 2, **shown
) -> Figure:
    """Draw panels with one legend; by default colour is the norm order, line style the initialization."""
    arms = {"hue": "norm order", "style": "initialization" if col != "initialization" else None, "palette": _PALETTE}
    lines = {"units": "seed", "estimator": None, "linewidth": 0.9} | arms | shown
    if col == "initialization":  # the line is the mean over the seeds, which are drawn as points
        lines |= {"units": None, "estimator": "mean", "errorbar": None}
    width = (PAGE_WIDTH if columns > 2 else COLUMN_WIDTH) / columns
    size = {"height": width * 1.05, "aspect": 0.95, "col_wrap": columns}
    facets = {"sharex": share_x, "legend_out": False}
    with column_style():
        grid = sns.relplot(rows, x=x, y=y, col=col, kind="line", facet_kws=facets, **lines, **size)
        grid.set_titles(title)
        sns.move_legend(
            grid, "upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, frameon=False, title_fontsize="small"
        )
    plt.close(grid.figure)  # otherwise a notebook shows it twice
    return grid.figure


def _logarithmic(figure: Figure) -> None:
    """Use a logarithmic y axis with labels at 1 and 3 of each decade, or at decades only if it spans many."""
    for axis in figure.axes:
        axis.set(yscale="log")
        low, high = axis.get_ylim()
        if high / low < 1e3:
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def _mark_references(axis: plt.Axes, cells: pd.DataFrame) -> None:
    """Draw reference losses: the unigram entropy (dotted) and the lowest loss possible without context (dashed)."""
    for name, style in (("scored_entropy", ":"), ("context_free_loss", (0, (6, 2)))):
        axis.axhline(cells[name].dropna().iloc[0], color="0.4", linewidth=0.8, linestyle=style)
