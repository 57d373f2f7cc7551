"""The figures of the miniature, one for each table or figure of the paper that it follows."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis.report.style import BLUE, GREEN, GREY, ORANGE, house_style, page_figure

from .decide import MODEL, PRIMARY, by_model

COLORS = {"pre-norm": BLUE, "post-norm": ORANGE, "with a teacher": GREEN, "equal FLOPs": GREY, "random weights": GREY}
ARMS = dict(zip(("pre", "post", "distilled", "long", "random"), COLORS, strict=True))  # by the end of their name


def draw_losses(records: Mapping[str, dict[str, Any]], title: str) -> Figure:
    """Figure 6: validation loss over tokens of each scored pretraining, the wider models in thicker lines."""
    rows = []
    for name, record in records.items():
        kind, arm, *place = name.split("/")
        if kind == "pretrain":
            family, _, end = arm.partition("_")
            config = record["config"]
            per_step = config["global_batch_size"] * config["model"]["max_position_embeddings"] / 1e6
            shared = {"family": family.upper(), "arm": ARMS[end], "hidden size": int(place[0]), "name": name}
            points = [(int(step) * per_step, loss) for step, loss in config["curve"].items() if int(step)]
            rows += [shared | {"million tokens": tokens, "validation loss, nats": loss} for tokens, loss in points]
    with house_style():
        figure = page_figure(title, 3.4)
        groups = pd.DataFrame(rows).groupby("family")
        for axis, (family, group) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
            axes = {"x": "million tokens", "y": "validation loss, nats", "hue": "arm", "size": "hidden size"}
            sns.lineplot(group, **axes, units="name", estimator=None, palette=COLORS, sizes=(0.6, 2.4), ax=axis)
            axis.set_title(family)
    return figure


def draw_over_size(rows: pd.DataFrame, labels: Mapping[str, str], title: str) -> Figure:
    """Means over the hidden size and ranges over the pretrainings, by arm; a panel for each column of `labels`."""
    rows = rows.assign(arm=rows["arm"].str.rpartition("_")[2].map(ARMS))
    with house_style():
        figure = page_figure(title, 3.0)
        for axis, (column, label) in zip(
            figure.subplots(1, len(labels), squeeze=False)[0], labels.items(), strict=True
        ):
            style = {"palette": COLORS, "errorbar": ("pi", 100), "marker": "o", "legend": axis is figure.axes[0]}
            sns.lineplot(rows.dropna(subset=[column]), x="width", y=column, hue="arm", **style, ax=axis)
            axis.set(xlabel="hidden size", ylabel=label)
    return figure


def primary_scores(scores: pd.DataFrame) -> pd.DataFrame:
    """The mean score of each pretraining in each group of primary tasks, a column each."""
    of_tasks = {what: by_model(scores, tasks).set_index([*MODEL, "model"])["score"] for what, tasks in PRIMARY.items()}
    return pd.DataFrame(of_tasks).reset_index()
