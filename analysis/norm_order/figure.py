"""Figures of both norm-order studies: colour shows the placement, in the second a mark the run's state.

Titles that state a result of the second study take it from the record of `decide.py`.
"""

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.report.style import BLUE, FONT_SIZE, GREEN, GREY, ORANGE, house_style, page_figure

from .cells import STATISTICS, STEP, at_chosen_rates, learned_means
from .hypotheses import Rule, mechanism_cells
from .limits import LIMIT_GROUPS
from .run_folder import NATS
from .tables import NAMES

COLORS = {"pre": BLUE, "post": ORANGE, "b2t": GREEN}
MARKS = {"learned": "o", "stuck": "x", "diverged": "^"}
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
        for place, (words, color) in enumerate(zip(_learned(part).split(", "), (BLUE, ORANGE), strict=True)):
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
    handles = [Line2D([], [], color=COLORS[order], label=NAMES[order]) for order in ("pre", "post")]
    handles += [Line2D([], [], color=GREY, linewidth=0.9, linestyle=s, label=n) for n, s in _REFERENCES.values()]
    with house_style():
        figure = page_figure(title, 0.8 + 2.6 * len(starts))
        axes = figure.subplots(len(starts), len(depths), squeeze=False, sharex=True, sharey=True)
        for line, start in zip(axes, starts, strict=True):
            for axis, layers in zip(line, depths, strict=True):
                part = rows[(rows["layers"] == layers) & (True if start is None else rows["scaled"] == start)]
                for (order, *_), run in part.groupby(["order", "scaled", "lr", "seed"]):
                    axis.plot(run["step"], run["loss"], color=COLORS[order], linewidth=1)
                for column, (_, style) in _REFERENCES.items():
                    axis.axhline(cells[column].dropna().iloc[0], color=GREY, linewidth=0.9, linestyle=style)
            line[0].set_ylabel(_LOSS if start is None else f"initialization {_STARTS[start]}\n{_LOSS}")
        for top, bottom, layers in zip(axes[0], axes[-1], depths, strict=True):
            top.set_title(f"{layers} layers")
            bottom.set_xlabel("step")
        figure.legend(
            handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.8, columnspacing=1.4
        )
    return figure


def draw_final_losses(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """Final loss over learning rate: one panel per depth, one mark per seed (101 and 102).

    Lines join the means of the rates at which both seeds learned. Placements are drawn side by side around a rate.

    Args:
        cells, record: results of `study_cells` and `decide`.
    """
    groups = [*LIMIT_GROUPS, "deep_b2t"]
    rows = cells[cells["group"].isin(groups) & (cells["warmup"] == 100) & cells["order"].isin(COLORS)]
    limits = {(row["layers"], row["order"]): row["limit"] for row in record["config"]["limits"] if row["warmup"] == 100}
    depths, words = sorted(rows["layers"].unique()), []
    for order in COLORS:
        if (depths[-1], order) in limits:
            words.append(f"{NAMES[order]} {limits[depths[-1], order]:.2g}")
        else:  # no limit was looked for
            means = learned_means(rows[(rows["layers"] == depths[-1]) & (rows["order"] == order)])
            words.append(f"{NAMES[order]} learns at {means.index.max():.2g}")
    with house_style():
        figure = page_figure(f"Rate limits at {depths[-1]} layers: {', '.join(words)}", 3.4)
        for axis, layers in zip(figure.subplots(1, len(depths), sharey=True), depths, strict=True):
            for shift, (order, color) in zip((0.86, 1.0, 1.16), COLORS.items(), strict=True):
                part = rows[(rows["layers"] == layers) & (rows["order"] == order)]
                means = learned_means(part)
                axis.plot(means.index * shift, means, color=color, linewidth=1)
                _marks(axis, part["lr"] * shift, part["train_loss"], part["state"], color)
            axis.set(title=f"{layers} layers", xlabel="learning rate", xscale="log")
            rates = sorted(rows["lr"].unique())
            axis.set_xticks(rates, [f"{lr * 1e3:.3g}e-3" for lr in rates], rotation=60)
            axis.minorticks_off()
        figure.axes[0].set_ylabel(_LOSS)
        handles = [Line2D([], [], color=color, label=NAMES[order]) for order, color in COLORS.items()]
        for state, mark in MARKS.items():
            if (rows["state"] == state).any():
                handles.append(Line2D([], [], color="0.2", marker=mark, linestyle="", markersize=4, label=state))
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.8)
    return figure


def draw_paired_losses(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """Final loss of each scored seed in every placement at its chosen rate: one panel per depth, one line per seed."""
    rows, tests = cells[cells["group"] == "losses"], record["config"]["tests"]
    depths = sorted(rows["layers"].unique())
    words = []
    for test, n in zip(tests[:2], depths, strict=True):
        lower = f"lower in {test['effect'] * test['n']:.0f} of {test['n']} seeds"
        effect = f"{test['effect']:+.3f} nats" if test["method"] == "paired t" else lower
        words.append(f"{effect} at {n} layers")
    with house_style():
        figure = page_figure(f"Post- minus pre-norm: {', '.join(words)}", 3.4)
        for axis, layers in zip(figure.subplots(1, len(depths), sharey=True), depths, strict=True):
            part = rows[rows["layers"] == layers]
            by_seed = part.pivot(index="seed", columns="order", values="train_loss").reindex(columns=list(COLORS))
            axis.plot(range(len(COLORS)), by_seed.T, color=GREY, linewidth=0.8)
            names = []
            for at, (order, color) in enumerate(COLORS.items()):
                arm = part[part["order"] == order]
                _marks(axis, [at] * len(arm), arm["train_loss"], arm["state"], color)
                learned = f"{(arm['state'] == 'learned').sum()} of {len(arm)} learned"
                names.append(f"{NAMES[order]}\n{learned}\nlr {arm['lr'].iloc[0]:g}")
            axis.set_xticks(range(len(COLORS)), names)
            axis.set(title=f"{layers} layers", xlim=(-0.4, len(COLORS) - 0.6))
        figure.axes[0].set_ylabel(_LOSS)
    return figure


def draw_mechanism(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """The rule's statistic at step 100 by state, held-out runs dark, with the threshold."""
    found, used = record["config"]["mechanism"], mechanism_cells(cells)
    rule = Rule(**found["rule"])
    label = f"{STATISTICS[rule.statistic]} at step {STEP}"
    title = f"{label} is right for {found['accuracy']:.0%} of {found['n']} held-out runs"
    used = used.assign(role=used["judges"].map({False: "chooses the rule", True: "scores it"}))
    with house_style():
        figure = page_figure(f"{title} ({found['low']:.0%} to {found['high']:.0%})", 3.4)
        axis = figure.subplots()
        style = {"palette": {"chooses the rule": GREY, "scores it": BLUE}, "dodge": True, "size": 4}
        sns.swarmplot(used, x="state", y=rule.statistic, hue="role", ax=axis, **style)
        axis.axhline(rule.threshold, color=ORANGE, linewidth=1, linestyle="--", label="threshold")
        axis.set(xlabel="", ylabel=label, yscale="log")
        axis.legend(frameon=False)
    return figure


def _marks(axis: Axes, x: Any, y: Any, states: pd.Series, color: str) -> None:
    """One mark per run, by its state."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    for state, mark in MARKS.items():
        at = (states == state).to_numpy()
        if at.any():
            axis.scatter(x[at], y[at], s=18, marker=mark, color=color, linewidth=1, zorder=3)
