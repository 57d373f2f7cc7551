"""Figure of the small finetuning runs: all seeds from published and random weights, and the required score."""

import pandas as pd
from matplotlib.figure import Figure

from analysis.report.style import BLUE, ORANGE, house_style, page_figure

_COLORS = {"published weights": BLUE, "random weights": ORANGE}
_MARKS = {"published weights": "o", "random weights": "X"}


def draw_small_runs(rows: pd.DataFrame) -> Figure:
    """Draw one point per run, one column per task, and the required score as a dash.

    Args:
        rows: result of `small_runs`.
    """
    tasks = list(rows["metric"].unique())
    with house_style():
        figure = page_figure("Published and random weights, three seeds, and the required score", 3.2)
        axis = figure.subplots()
        for kind, part in rows.groupby("kind"):
            places = part["metric"].map(tasks.index) + 0.08 * (part["seed"] - part["seed"].mean())
            axis.scatter(places, part["score"], color=_COLORS[kind], marker=_MARKS[kind], s=34, label=kind)
        for place, task in enumerate(tasks):
            floor = rows.loc[rows["metric"] == task, "floor"].iloc[0]
            word = "required score, set in advance" if place == 0 else None
            axis.hlines(floor, place - 0.3, place + 0.3, color="0.3", linewidth=1.2, linestyle="--", label=word)
        axis.set_xticks(range(len(tasks)), [task.replace("/", "\n") for task in tasks])
        axis.set(ylabel="score, %", ylim=(-10, 100))
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
