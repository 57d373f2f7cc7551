"""Figures of the second norm-order study, of the cells that have run; a figure without any is None.

Colour shows the placement, the mark a run's state. Titles that state a result take it from the record of `outcome.py`.
"""

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from analysis.report.style import BLUE, FONT_SIZE, GREY, ORANGE, house_style, page_figure

from .cells import learned_means
from .limits import LIMIT_GROUPS, observations, rate, read_limits
from .mechanism import STEP, Rule, mechanism_cells
from .outcome_table import NAMES
from .run_folder import NATS
from .study_tests import has_run

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


def draw_final_losses(cells: pd.DataFrame, record: dict[str, Any]) -> Figure | None:
    """Final loss over learning rate: one panel per depth, one mark per seed (101 and 102).

    Lines join the means of the rates at which both seeds learned.

    Args:
        cells, record: results of `read_study` and `outcome.summarize`.
    """
    rows = cells[
        cells["group"].isin([*LIMIT_GROUPS, "deep_b2t"]) & (cells["warmup"] == 100) & cells["order"].isin(COLORS)
    ]
    ran = rows[rows["state"].notna()]
    if ran.empty:
        return None
    limits = {(row["layers"], row["order"], row["warmup"]): row for row in record["config"]["limits"]}
    deepest = [layers for layers in sorted(ran["layers"].unique()) if (layers, "post", 100) in limits]
    words = []
    for order in COLORS if deepest else ():
        tried = ran[(ran["layers"] == deepest[-1]) & (ran["order"] == order)]
        if (deepest[-1], order, 100) in limits:
            words.append(f"{NAMES[order]} {_bounded(limits[deepest[-1], order, 100])}")
        elif not learned_means(tried).empty:  # no limit was looked for
            words.append(f"{NAMES[order]} learns at {learned_means(tried).index.max():.2g}")
    title = f"Rate limits at {deepest[-1]} layers: {', '.join(words)}" if deepest else "Final loss by learning rate"
    with house_style():
        figure = page_figure(title + _missing(rows), 3.4)
        depths = sorted(ran["layers"].unique())
        axes = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
        for axis, layers in zip(axes, depths, strict=True):
            for order, color in COLORS.items():
                part = ran[(ran["layers"] == layers) & (ran["order"] == order)]
                axis.plot(learned_means(part), color=color, linewidth=1)
                _marks(axis, part["lr"], part["train_loss"], part["state"], color)
            axis.set(title=f"{layers} layers", xlabel=RATE)
            _rates(axis.xaxis, axis, ran["lr"], "x")
        axes[0].set_ylabel(LOSS)
        handles = [Line2D([], [], color=color, label=NAMES[order]) for order, color in COLORS.items()]
        for state, mark in MARKS.items():
            if (ran["state"] == state).any():
                handles.append(Line2D([], [], color="0.2", marker=mark, linestyle="", markersize=4, label=state))
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=1.8)
        sns.despine(figure)
    return figure


def draw_limits(cells: pd.DataFrame, record: dict[str, Any]) -> Figure | None:
    """Rate limit of each seed over depth, with the fitted depth^-k where three depths have run.

    None while fewer than two depths have limits.
    """
    limits, fits = read_limits(cells), record["config"]["exponents"]
    found = {order: observations(limits, order) for order in COLORS}
    if pd.concat(found.values())["layers"].nunique() < 2:
        return None
    decision = record["config"]["tests"][6]["decision"]
    title = {"supported": "Post-norm's rate limit falls faster with depth than pre-norm's"}.get(
        decision,
        "Rate limit by depth" + (" (test 7 not run)" if decision == "not run" else ": no faster fall is shown"),
    )
    with house_style():
        figure = page_figure(title, 3.4)
        axis = figure.subplots()
        for shift, (order, rows) in zip((0.96, 1.0, 1.04), found.items(), strict=True):
            if rows.empty:
                continue
            fit, label = fits.get(order), NAMES[order]
            if fit:
                label += f": k {fit['k']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"
                depths = np.array(sorted(rows["layers"].unique()), float)
                center = np.log2(rows["layers"]).mean(), rows["place"].mean()
                axis.plot(
                    depths,
                    rate(0) * 2 ** (center[1] - fit["k"] * (np.log2(depths) - center[0])),
                    color=COLORS[order],
                    linestyle=STYLES[order],
                )
            size = 16.0 + 40 * rows.groupby(["layers", "place"]).cumcount()  # equal limits of two seeds: a ring
            axis.scatter(
                rows["layers"] * shift, [rate(at) for at in rows["place"]], s=size,
                facecolors="none", edgecolors=COLORS[order], label=label,
            )  # fmt: skip
        shown = pd.concat([rows for rows in found.values()])
        axis.set(xscale="log", xlabel="layers", ylabel=f"rate limit ({RATE})")
        axis.set_xticks(sorted(shown["layers"].unique()), [f"{n}" for n in sorted(shown["layers"].unique())])
        axis.xaxis.set_minor_locator(NullLocator())
        _rates(axis.yaxis, axis, pd.Series([rate(at) for at in shown["place"]]), "y")
        axis.legend(
            frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title="depth^-k, 95 %" if fits else None
        )
        sns.despine(figure)
    return figure


def draw_paired_losses(cells: pd.DataFrame, record: dict[str, Any]) -> Figure | None:
    """Final loss of each scored seed in every placement at its chosen rate: one panel per depth, one line per seed."""
    rows = cells[cells["group"] == "losses"]
    ran = rows[rows["state"].notna()]
    if ran.empty:
        return None
    tests = [record["config"]["tests"][i] for i in (0, 1)]
    words = [
        f"{test['effect']:+.3f} nats at {n} layers"
        for test, n in zip(tests, (12, 24), strict=True)
        if test["method"] == "paired t"
    ]
    title = f"Post-norm minus pre-norm: {', '.join(words)}" if words else "Final loss of the scored seeds"
    with house_style():
        figure = page_figure(title + _missing(rows), 3.4)
        depths = sorted(ran["layers"].unique())
        axes = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
        for axis, layers in zip(axes, depths, strict=True):
            part = ran[ran["layers"] == layers]
            by_seed = part.pivot(index="seed", columns="order", values="train_loss").reindex(columns=list(COLORS))
            axis.plot(range(len(COLORS)), by_seed.T, color=GREY, linewidth=0.8)
            names = []
            for at, (order, color) in enumerate(COLORS.items()):
                arm = part[part["order"] == order]
                _marks(axis, [at] * len(arm), arm["train_loss"], arm["state"], color)
                learned = int((arm["state"] == "learned").sum())
                names.append(
                    f"{NAMES[order]}\n{learned} of {len(arm)} learned"
                    + (f"\nlr {arm['lr'].iloc[0]:g}" if len(arm) else "")
                )
            axis.set_xticks(range(len(COLORS)), names)
            axis.set(title=f"{layers} layers", xlim=(-0.4, len(COLORS) - 0.6))
        axes[0].set_ylabel(LOSS)
        sns.despine(figure)
    return figure


def draw_mechanism(cells: pd.DataFrame, record: dict[str, Any]) -> Figure | None:
    """The rule's statistic at step 100 by state, held-out runs dark, with the threshold; and the confusion table.

    Drawn once the rule has been judged.
    """
    found = record["config"]["mechanism"]
    if found is None:
        return None
    used, rule = mechanism_cells(cells), Rule(**found["rule"])
    title = f"{rule.statistic} at step {STEP} is right for {found['accuracy']:.0%} of {found['n']} held-out runs"
    states = [state for state in MARKS if (used["state"] == state).any()]
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
        left.set(ylabel=f"{rule.statistic} at step {STEP}", xlim=(-0.5, len(states) - 0.5))
        counts = [
            [found["confusion"][f"{a}, predicted {b}"] for b in ("stuck", "not stuck")] for a in ("stuck", "not stuck")
        ]
        right.imshow(counts, cmap="Blues", vmin=0, vmax=2 * max(max(row) for row in counts))
        for i, row in enumerate(counts):
            for j, count in enumerate(row):
                right.text(j, i, str(count), ha="center", va="center", fontsize=FONT_SIZE + 2)
        right.set_xticks((0, 1), ("stuck", "not stuck"))
        right.set_yticks((0, 1), ("stuck", "not stuck"))
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
        sns.despine(figure)
    return figure


def draw_recovery(cells: pd.DataFrame, record: dict[str, Any]) -> Figure | None:
    """Rate limit by warm-up at each depth, and how many of the eight pairs learned without and with an intervention."""
    limits = [row for row in record["config"]["limits"] if row["final"] and row["layers"] in (12, 24)]
    counts = {
        name: cells[cells["group"] == group]
        for group, name in (("mechanism", "post-norm"), ("slow_start", "warm-up 400"), ("rescaled", "DeepNorm"))
    }
    if not any(row["warmup"] != 100 for row in limits) or not any(
        rows["state"].notna().any() for rows in counts.values()
    ):
        return None
    learned = [
        f"{name} {int((rows['state'] == 'learned').sum())} of {len(rows)}"
        for name, rows in counts.items()
        if has_run(rows)
    ]
    conditions = counts["post-norm"][["layers", "lr"]].drop_duplicates()
    where = ", ".join(f"{row.layers} layers at {row.lr * 1e3:g}e-3" for row in conditions.itertuples())
    title = f"Runs that learn: {', '.join(learned)}" if learned else "Rate limit by warm-up"
    with house_style():
        figure = page_figure(title + _missing(pd.concat(counts.values())), 3.4)
        axes = figure.subplots(1, 3, width_ratios=(2, 2, 3))
        axes[1].sharey(axes[0])
        for axis, layers in zip(axes, (12, 24), strict=False):
            of_depth = [row for row in limits if row["layers"] == layers]
            post = sorted((row["warmup"], row["limit"]) for row in of_depth if row["order"] == "post")
            axis.plot(*zip(*post, strict=True), "o-", color=ORANGE, markersize=4) if post else None
            for row in of_depth:
                if row["order"] != "post":
                    axis.axhline(row["limit"], color=COLORS[row["order"]], **REFERENCES[row["order"]])
            axis.set(title=f"{layers} layers", xlabel="warm-up, steps")
            _rates(axis.yaxis, axis, pd.Series([row["limit"] for row in limits]), "y")
        axes[0].set_ylabel("rate limit, lower of two seeds")
        for at, rows in enumerate(counts.values()):
            learned = int((rows["state"] == "learned").sum())
            axes[2].bar(at, len(rows), color="none", edgecolor=GREY, width=0.6)
            axes[2].bar(at, learned, color=GREY, width=0.6)
            ran = int(rows["state"].notna().sum())
            axes[2].text(
                at, len(rows) + 0.15, f"{learned} of {ran}" if ran else "not run", ha="center", fontsize=FONT_SIZE - 1
            )
        arms = [rows.iloc[0] for rows in counts.values()]
        axes[2].set_xticks(range(len(arms)), [f"{NAMES[arm.order]}\nwarm-up {arm.warmup}" for arm in arms])
        axes[2].set(ylabel="runs that learned", title=where)
        handles = [Line2D([], [], color=ORANGE, marker="o", markersize=4, label=NAMES["post"])]
        for order in ("pre", "b2t"):
            label = f"{NAMES[order]} at a warm-up of 100"
            handles.append(Line2D([], [], color=COLORS[order], label=label, **REFERENCES[order]))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        sns.despine(figure)
    return figure


def _missing(rows: pd.DataFrame) -> str:
    ran = int(rows["state"].notna().sum())
    return "" if ran == len(rows) else f" ({ran} of {len(rows)} runs are recorded)"


def _bounded(limit: dict[str, Any]) -> str:
    open_ended = limit["bound"] or ("" if limit["final"] else "not final, ")
    return f"{open_ended} {limit['limit']:.2g}".strip()


def _marks(axis: Axes, x: Any, y: Any, states: pd.Series, color: str) -> None:
    """One mark per run, by its state."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    for state, mark in MARKS.items():
        at = (states == state).to_numpy()
        if at.any():
            axis.scatter(x[at], y[at], s=18, marker=mark, color=color, linewidth=1, zorder=3)


def _rates(scaled: Any, axis: Axes, rates: pd.Series, which: str) -> None:
    """A logarithmic axis with a tick at every rate."""
    axis.set(**{f"{which}scale": "log"})
    values = sorted(rates.unique())
    scaled.set_ticks(values, labels=[f"{value * 1e3:.3g}e-3" for value in values])
    scaled.set_minor_locator(NullLocator())
    scaled.set_minor_formatter(NullFormatter())
    if which == "x":
        axis.tick_params(axis="x", rotation=60)
