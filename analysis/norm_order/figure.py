"""Figure 7 as a controlled experiment: colour shows the norm order; each initialization has its own row of panels."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.report.style import BLUE, FONT_SIZE, GREY, ORANGE, house_style, page_figure

from .cells import CELL, at_chosen_rates
from .run_folder import NATS

_ORDERS = {"pre": BLUE, "post": ORANGE}
_STATES = {"learned": BLUE, "stuck": ORANGE, "diverged": ORANGE}
_WIDE = {"linewidth": 4.0, "alpha": 0.35}  # of lines on which others lie
_STARTS = {True: "scaled by 1/sqrt(2 L)", False: "not scaled"}
_LOSS = f"training loss, {NATS}"
_REFERENCES = {  # column of the cells: name, line style
    "scored_entropy": ("unigram entropy", ":"),
    "context_free_loss": ("best without context", (0, (6, 2))),
}
_NORM = "gradient norm, nats per unit weight"


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
    figure = _panels(rows, ("step", "loss"), ("layers", "{} layers"), title, _LOSS, by_start=True)
    parts = [
        runs[(runs["scaled"] == start) & (runs["layers"] == n)] for start in _STARTS for n in _values(runs, "layers")
    ]
    for axis, part in zip(figure.axes, parts, strict=True):
        _mark_references(axis, cells)
        for place, (words, color) in enumerate(zip(_learned(part).split(", "), _ORDERS.values(), strict=True)):
            style = {"transform": axis.transAxes, "ha": "right", "va": "top", "fontsize": FONT_SIZE}
            axis.text(0.98, 0.97 - 0.1 * place, words, color=color, **style)
    _key(figure, references=True)
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
    rows = curves.assign(scaled=True)
    figure = _panels(
        rows, ("step", "loss"), ("layers", "{} layers"), "BERT 336M and 752M at their true widths, 2,000 steps", _LOSS
    )
    for axis in figure.axes:
        _mark_references(axis, cells)
    _key(figure, references=True)
    return figure


def draw_failures(norms: pd.DataFrame, cells: pd.DataFrame, factorial: int, steps: tuple[int, int]) -> Figure:
    """Draw the gradient norm per layer of every post-norm run of the factorial, before the first update and later.

    Before it, runs that differ in the rate only have the same gradient: the runs that learned are wide lines, on which
    the others lie.

    Args:
        norms: result of `read_gradient_norms`.
        steps: the two panels' steps.
    """
    rows = norms.merge(cells[[*CELL, "state"]], on=CELL)
    rows = rows[(rows["layers"] == factorial) & (rows["order"] == "post") & rows["step"].isin(steps)]
    title = "Runs that fail start like the others; their gradient vanishes during training"
    figure = _panels(rows, ("layer", "norm"), ("step", "step {}"), title, _NORM, ("state", _STATES), share={})
    _logarithmic(figure)
    _key(figure, {state: color for state, color in _STATES.items() if (rows["state"] == state).any()})
    return figure


def _values(rows: pd.DataFrame, column: str) -> list:
    return sorted(rows[column].unique())


def _panels(
    rows: pd.DataFrame,
    drawn: tuple[str, str],
    panels: tuple[str, str],
    title: str,
    label: str,
    hue: tuple[str, Mapping[str, str]] = ("order", _ORDERS),
    by_start: bool = False,
    share: Mapping[str, str | bool] = MappingProxyType({"sharex": True, "sharey": True}),
) -> Figure:
    """Draw one line per run.

    Args:
        drawn: columns of x and y.
        panels: column with one panel per value, and the form of their titles.
        label: of the y axis.
        hue: column with one colour per value, and the colours; runs of the state `learned` are wide lines.
        by_start: one row of panels per initialization.
        share: axes that the panels share.
    """
    (x, y), (col, heading), (kind, colors) = drawn, panels, hue
    values, starts = _values(rows, col), list(_STARTS) if by_start else [None]
    with house_style():
        figure = page_figure(title, 0.8 + 2.6 * len(starts))
        axes = figure.subplots(len(starts), len(values), squeeze=False, **share)
        for line, start in zip(axes, starts, strict=True):
            for axis, value in zip(line, values, strict=True):
                part = rows[(rows[col] == value) & (True if start is None else rows["scaled"] == start)]
                for (name, *_), run in part.groupby([kind, "scaled", "lr", "seed"]):
                    axis.plot(run[x], run[y], color=colors[name], **(_WIDE if name == "learned" else {"linewidth": 1}))
            line[0].set_ylabel(label if start is None else f"initialization {_STARTS[start]}\n{label}")
        for top, bottom, value in zip(axes[0], axes[-1], values, strict=True):
            top.set_title(heading.format(value))
            bottom.set_xlabel(x)
    return figure


def _key(figure: Figure, colors: Mapping[str, str] | None = None, references: bool = False) -> None:
    """Name the colours and the references' line styles in one line below the panels."""
    shown = colors or {f"{order}-norm": color for order, color in _ORDERS.items()}
    width = {"learned": _WIDE}
    handles = [Line2D([], [], color=color, label=name, **width.get(name, {})) for name, color in shown.items()]
    if references:
        handles += [Line2D([], [], color=GREY, linewidth=0.9, linestyle=s, label=n) for n, s in _REFERENCES.values()]
    with house_style():
        figure.legend(
            handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.8, columnspacing=1.4
        )


def _logarithmic(figure: Figure) -> None:
    """Use a logarithmic y axis with four labels per decade, or at powers of ten only if it spans many."""
    for axis in figure.axes:
        axis.set(yscale="log")
        low, high = axis.get_ylim()
        if high / low < 1e3:
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 4.0, 7.0)))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def _mark_references(axis: Axes, cells: pd.DataFrame) -> None:
    """Draw the reference losses."""
    for column, (_, style) in _REFERENCES.items():
        axis.axhline(cells[column].dropna().iloc[0], color=GREY, linewidth=0.9, linestyle=style)
