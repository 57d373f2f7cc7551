"""Figures of the second norm-order study: colour shows the placement, the mark a run's state.

Titles that state a result take it from the record of `decide.py`.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from analysis.report.style import BLUE, FONT_SIZE, GREY, ORANGE, house_style, page_figure

from .cells import STATISTICS, STEP, learned_means
from .decide import LIMIT_GROUPS, Rule, mechanism_cells, observations, rate, read_limits
from .outcome_table import NAMES
from .run_folder import NATS

GREEN = "#00795a"
COLORS = {"pre": BLUE, "post": ORANGE, "b2t": GREEN}
MARKS = {"learned": "o", "stuck": "x", "diverged": "^"}
LOSS = f"training loss, {NATS}"
RATE = "learning rate"
REFERENCES = {  # lines that may lie on each other and on post-norm's: a wide one below, dots above
    "pre": {"linewidth": 5, "alpha": 0.35, "zorder": 1},
    "b2t": {"linewidth": 2, "linestyle": ":", "zorder": 3},
}
STYLES = {"pre": "--", "post": "-", "b2t": ":"}  # of lines that may lie on each other


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
            axis.set(title=f"{layers} layers", xlabel=RATE, xscale="log")
            _label_rates(axis.xaxis, rows["lr"])
            axis.tick_params(axis="x", rotation=60)
        figure.axes[0].set_ylabel(LOSS)
        handles = [Line2D([], [], color=color, label=NAMES[order]) for order, color in COLORS.items()]
        for state, mark in MARKS.items():
            if (rows["state"] == state).any():
                handles.append(Line2D([], [], color="0.2", marker=mark, linestyle="", markersize=4, label=state))
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.8)
    return figure


def draw_limits(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """Rate limit of each seed over depth, with the fitted depth^-k."""
    limits, fits = read_limits(cells), record["config"]["exponents"]
    found = {order: observations(limits, order) for order in COLORS}
    supported = record["config"]["tests"][6]["decision"] == "supported"
    faster = "Post-norm's rate limit falls faster with depth than pre-norm's"
    with house_style():
        figure = page_figure(faster if supported else "Rate limit by depth: no faster fall is shown", 3.4)
        axis = figure.subplots()
        for shift, (order, rows) in zip((0.96, 1.0, 1.04), found.items(), strict=True):
            fit, depths = fits[order], np.array(sorted(rows["layers"].unique()), float)
            center = np.log2(rows["layers"]).mean(), rows["place"].mean()
            line = rate(0) * 2 ** (center[1] - fit["k"] * (np.log2(depths) - center[0]))
            axis.plot(depths, line, color=COLORS[order], linestyle=STYLES[order])
            axis.scatter(
                rows["layers"] * shift,
                [rate(at) for at in rows["place"]],
                s=16.0 + 40 * rows.groupby(["layers", "place"]).cumcount(),  # equal limits of two seeds: a ring
                facecolors="none",
                edgecolors=COLORS[order],
                label=f"{NAMES[order]}: k {fit['k']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]",
            )
        shown = pd.concat(found.values())
        axis.set(xscale="log", yscale="log", xlabel="layers", ylabel=f"rate limit ({RATE})")
        axis.set_xticks(sorted(shown["layers"].unique()), [f"{n}" for n in sorted(shown["layers"].unique())])
        axis.xaxis.set_minor_locator(NullLocator())
        _label_rates(axis.yaxis, pd.Series([rate(at) for at in shown["place"]]))
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title="depth^-k, 95 %")
    return figure


def draw_paired_losses(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """Final loss of each scored seed in every placement at its chosen rate: one panel per depth, one line per seed."""
    rows, tests = cells[cells["group"] == "losses"], record["config"]["tests"]
    depths = sorted(rows["layers"].unique())
    words = [
        f"{test['effect']:+.3f} nats at {n} layers"
        for test, n in zip(tests[:2], depths, strict=True)
        if test["method"] == "paired t"
    ]
    with house_style():
        figure = page_figure(f"Post-norm minus pre-norm: {', '.join(words)}", 3.4)
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
        figure.axes[0].set_ylabel(LOSS)
    return figure


def draw_mechanism(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """The rule's statistic at step 100 by state, held-out runs dark, with the threshold; and the confusion table."""
    found, used = record["config"]["mechanism"], mechanism_cells(cells)
    rule = Rule(**found["rule"])
    label = f"{STATISTICS[rule.statistic]} at step {STEP}"
    title = f"{label} is right for {found['accuracy']:.0%} of {found['n']} held-out runs"
    states, called = [state for state in MARKS if (used["state"] == state).any()], ("stuck", "not stuck")
    with house_style():
        figure = page_figure(f"{title} ({found['low']:.0%} to {found['high']:.0%})", 3.4)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for at, state in enumerate(states):
            for judges, color, side in ((False, GREY, -0.15), (True, BLUE, 0.15)):
                part = used[(used["state"] == state) & (used["judges"] == judges)][rule.statistic]
                spread = np.linspace(-0.1, 0.1, len(part)) if len(part) > 1 else np.zeros(len(part))
                left.scatter(at + side + spread, part, s=14, color=color)
        left.axhline(rule.threshold, color=ORANGE, linewidth=1, linestyle="--")
        left.set_yscale("log" if (used[rule.statistic] > 0).all() else "linear")
        left.set_xticks(range(len(states)), states)
        left.set(ylabel=label, xlim=(-0.5, len(states) - 0.5))
        counts = [[found["confusion"][f"{a}, predicted {b}"] for b in called] for a in called]
        right.imshow(counts, cmap="Blues", vmin=0, vmax=2 * max(max(row) for row in counts))
        for i, row in enumerate(counts):
            for j, count in enumerate(row):
                right.text(j, i, str(count), ha="center", va="center", fontsize=FONT_SIZE + 2)
        right.set_xticks((0, 1), called)
        right.set_yticks((0, 1), called)
        right.set(xlabel="predicted", ylabel="held-out runs")
        rules = f"loss alone {found['loss_accuracy']:.0%},\ndepth, rate, warm-up {found['condition_accuracy']:.0%}"
        right.set_title(rules)
        points = {"chooses the rule": GREY, "scores it": BLUE}
        handles = [
            Line2D([], [], color=color, marker="o", linestyle="", markersize=4, label=name)
            for name, color in points.items()
        ]
        handles.append(Line2D([], [], color=ORANGE, linestyle="--", label="threshold"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_recovery(cells: pd.DataFrame, record: dict[str, Any]) -> Figure:
    """Rate limit by warm-up at each depth, and how many of the eight pairs learned without and with an intervention."""
    limits = [row for row in record["config"]["limits"] if row["layers"] in (12, 24)]
    arms = [cells[cells["group"] == group] for group in ("mechanism", "slow_start", "rescaled")]
    learned = [int((rows["state"] == "learned").sum()) for rows in arms]
    words = [
        f"{name} {count} of {len(rows)}"
        for name, count, rows in zip(("post-norm", "warm-up 400", "DeepNorm"), learned, arms, strict=True)
    ]
    where = f"{arms[0]['layers'].iloc[0]} layers at {arms[0]['lr'].iloc[0] * 1e3:g}e-3"
    with house_style():
        figure = page_figure(f"Runs that learn: {', '.join(words)}", 3.4)
        axes = figure.subplots(1, 3, width_ratios=(2, 2, 3))
        axes[1].sharey(axes[0])
        for axis, layers in zip(axes, (12, 24), strict=False):
            of_depth = [row for row in limits if row["layers"] == layers]
            post = sorted((row["warmup"], row["limit"]) for row in of_depth if row["order"] == "post")
            axis.plot(*zip(*post, strict=True), "o-", color=ORANGE, markersize=4)
            for row in of_depth:
                if row["order"] != "post":
                    axis.axhline(row["limit"], color=COLORS[row["order"]], **REFERENCES[row["order"]])
            axis.set(title=f"{layers} layers", xlabel="warm-up, steps", yscale="log")
            _label_rates(axis.yaxis, pd.Series([row["limit"] for row in limits]))
        axes[0].set_ylabel("rate limit, lower of two seeds")
        sizes = [len(rows) for rows in arms]
        axes[2].bar(range(len(arms)), sizes, color="none", edgecolor=GREY, width=0.6)
        axes[2].bar(range(len(arms)), learned, color=GREY, width=0.6)
        for at, (size, count) in enumerate(zip(sizes, learned, strict=True)):
            axes[2].text(at, size + 0.15, f"{count} of {size}", ha="center", fontsize=FONT_SIZE - 1)
        names = [f"{NAMES[rows['order'].iloc[0]]}\nwarm-up {rows['warmup'].iloc[0]}" for rows in arms]
        axes[2].set_xticks(range(len(arms)), names)
        axes[2].set(ylabel="runs that learned", title=where)
        handles = [Line2D([], [], color=ORANGE, marker="o", markersize=4, label=NAMES["post"])]
        for order in ("pre", "b2t"):
            label = f"{NAMES[order]} at a warm-up of 100"
            handles.append(Line2D([], [], color=COLORS[order], label=label, **REFERENCES[order]))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _marks(axis: Axes, x: Any, y: Any, states: pd.Series, color: str) -> None:
    """One mark per run, by its state."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    for state, mark in MARKS.items():
        at = (states == state).to_numpy()
        if at.any():
            axis.scatter(x[at], y[at], s=18, marker=mark, color=color, linewidth=1, zorder=3)


def _label_rates(axis: Axis, rates: pd.Series) -> None:
    """A tick at every rate of a logarithmic axis."""
    values = sorted(rates.unique())
    axis.set_ticks(values, labels=[f"{value * 1e3:.3g}e-3" for value in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
