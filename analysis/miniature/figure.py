"""The figures of the miniature, one for each table or figure of the paper that it follows."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.report.style import BLUE, GREEN, GREY, ORANGE, house_style, page_figure

from .decide import MODEL, PRIMARY, by_model

ARMS = {
    "gpt_pre": ("GPT", BLUE),
    "gpt_distilled": ("GPT with a teacher", GREEN),
    "gpt_long": ("GPT without it, at equal FLOPs", GREY),
    "bert_pre": ("BERT, pre-norm", BLUE),
    "bert_post": ("BERT, post-norm", ORANGE),
    "random": ("BERT, random weights", GREY),
}
FAMILIES = {"GPT": ("gpt_pre", "gpt_distilled", "gpt_long"), "BERT": ("bert_pre", "bert_post")}


def draw_losses(records: Mapping[str, dict[str, Any]], title: str) -> Figure:
    """Figure 6: validation loss over tokens of each scored pretraining, wider models in thicker lines."""
    with house_style():
        figure = page_figure(title, 3.4)
        axes = dict(zip(FAMILIES, figure.subplots(1, 2), strict=True))
        for name, record in records.items():
            kind, arm, *place = name.split("/")
            if kind == "pretrain":
                family, config = arm.partition("_")[0].upper(), record["config"]
                per_step = config["global_batch_size"] * config["model"]["max_position_embeddings"] / 1e6
                steps, losses = zip(*((int(step), loss) for step, loss in config["curve"].items()), strict=True)
                first = place == [min(place[0], "96"), "1"]
                axes[family].plot(
                    [step * per_step for step in steps[1:]],
                    losses[1:],
                    color=ARMS[arm][1],
                    linewidth=int(place[0]) / 140,
                    label=ARMS[arm][0] if first else None,
                )
        for family, axis in axes.items():
            axis.set(title=family, xlabel="million tokens", ylabel="validation loss, nats per scored token")
            axis.legend(frameon=False)
    return figure


def draw_over_size(rows: pd.DataFrame, columns: Mapping[str, str], title: str) -> Figure:
    """Points and means over the width by arm, one panel per column; `columns` has their labels."""
    with house_style():
        figure = page_figure(title, 3.0)
        for axis, (column, label) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
            for arm, group in rows.dropna(subset=[column]).groupby("arm", sort=False):
                words, color = ARMS[arm]
                axis.plot(group.groupby("width")[column].mean(), color=color, label=words)
                axis.scatter(group["width"], group[column], color=color, s=12)
            axis.set(xlabel="hidden size", ylabel=label, xscale="log")
            axis.set_xticks(sorted(rows["width"].unique()), map(str, sorted(rows["width"].unique())))
            axis.minorticks_off()
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def primary_scores(scores: pd.DataFrame) -> pd.DataFrame:
    """The mean score of each pretraining in each group of primary tasks, a column each."""
    parts = [
        by_model(scores, tasks).set_index([*MODEL, "model"])["score"].rename(what) for what, tasks in PRIMARY.items()
    ]
    return pd.concat(parts, axis=1).reset_index()
