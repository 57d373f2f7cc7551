"""The figures of the miniature, one for each table or figure of the paper that it follows."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report.style import BLUE, GREEN, GREY, ORANGE, house_style, page_figure

from .decide import MODEL, PRIMARY, finetunings, models, primary_scores

COLORS = {"pre-norm": BLUE, "post-norm": ORANGE, "with a teacher": GREEN, "equal FLOPs": GREY, "random weights": GREY}
ARMS = dict(zip(("pre", "post", "distilled", "long", "random"), COLORS, strict=True))  # by the end of their name
SIZE = "hidden size"


def study_figures(records: Mapping[str, dict[str, Any]]) -> dict[str, tuple[str, Figure]]:
    """Caption and drawing by name.

    Args:
        records: of the study's cells, by ID.
    """
    cells, primary = models(records), primary_scores(finetunings(records))
    of_family = dict(list(cells.groupby(cells["arm"].str.partition("_")[0])))
    smallest = of_family["gpt"][of_family["gpt"]["width"] == cells["width"].min()]
    both = cells.merge(primary, left_on=[*MODEL, "seed"], right_on=[*MODEL, "model"])
    both["score"] = both[[*PRIMARY]].mean(axis=1)
    of_points, loss = "Points are pretrainings, lines their means", "validation loss, nats"
    zero_shot = {"wikitext103": "WikiText-103 perplexity per word", "lambada": "log-probability of LAMBADA's word"}
    blimp, scores = {"blimp": "BLiMP accuracy, %"}, {what: f"{what}, %" for what in PRIMARY}
    return {
        "losses": (
            "Figure 6, scaled down. Validation loss over tokens, a line per pretraining, the wider the thicker",
            draw_losses(records, "A wider model ends lower; a teacher and more tokens help the smallest GPT"),
        ),
        "zero_shot": (
            f"Table 3, scaled down, and BLiMP. {of_points}; with a teacher and at its FLOPs the first width alone",
            draw_over_size(of_family["gpt"], zero_shot | blimp, "A wider GPT predicts text better"),
        ),
        "bert": (
            f"Section 5.3's pretraining loss, scaled down, and BLiMP. {of_points}",
            draw_over_size(of_family["bert"], {"loss": f"{loss}/masked token"} | blimp, "BERT over its size"),
        ),
        "downstream": (
            f"Table 5, scaled down: the primary tasks. {of_points}",
            draw_over_size(primary, scores, "Pretrained weights are above random ones in all primary tasks"),
        ),
        "teacher": (
            "The smallest GPT without a teacher, with one, and without one at the same FLOPs. A point per seed",
            draw_points(smallest, "flops", "loss", {"flops": "FLOPs", "loss": loss}, "What a teacher's FLOPs buy"),
        ),
        "association": (
            "Mean score in the primary tasks over the pretraining loss of BERT. A point per pretraining",
            draw_points(
                both, "loss", "score", {"loss": f"{loss}/masked token", "score": "mean score, %"}, "Loss and score"
            ),
        ),
    }


def draw_losses(records: Mapping[str, dict[str, Any]], title: str) -> Figure:
    """Figure 6: validation loss over tokens of each scored pretraining, the wider models in thicker lines."""
    rows = []
    for name, record in records.items():
        kind, arm, *place = name.split("/")
        if kind == "pretrain":
            config = record["config"]
            per_step = config["global_batch_size"] * config["model"]["max_position_embeddings"] / 1e6
            shared = {"arm": arm, "width": int(place[0]), "name": name}
            points = [(int(step) * per_step, loss) for step, loss in config["curve"].items() if int(step)]
            rows += [shared | {"tokens": tokens, "loss": loss} for tokens, loss in points]
    shown = named(pd.DataFrame(rows))
    with house_style():
        figure = page_figure(title, 3.4)
        groups = shown.groupby(shown["family"].str.upper())
        for axis, (family, group) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
            axes = {"x": "tokens", "y": "loss", "hue": "arm", "size": SIZE, "palette": COLORS, "ax": axis}
            sns.lineplot(group, **axes, units="name", estimator=None, sizes=(0.6, 2.0))
            axis.set(title=family, xlabel="million tokens", ylabel="validation loss, nats")
            move_legend(axis)
    return figure


def draw_over_size(rows: pd.DataFrame, labels: Mapping[str, str], title: str) -> Figure:
    """Pretrainings over their hidden size, and the means of each arm; a panel for each column of `labels`."""
    rows = named(rows)
    with house_style():
        figure = page_figure(title, 3.0)
        panels = figure.subplots(1, len(labels), squeeze=False)[0]
        for axis, (column, label) in zip(panels, labels.items(), strict=True):
            style = {"x": SIZE, "y": column, "hue": "arm", "palette": COLORS, "ax": axis}
            sns.lineplot(rows.dropna(subset=[column]), **style, errorbar=None, legend=False)
            sns.scatterplot(rows.dropna(subset=[column]), **style, s=16, legend=axis is panels[-1])
            axis.set(xscale="log", ylabel=label)
            axis.set_xticks(widths := sorted(rows[SIZE].unique()), widths, minor=False)
            axis.minorticks_off()
        move_legend(panels[-1])
    return figure


def draw_points(rows: pd.DataFrame, x: str, y: str, labels: Mapping[str, str], title: str) -> Figure:
    """One column over another, a point per pretraining, the wider models in larger points."""
    with house_style():
        figure = page_figure(title, 3.0)
        axis = figure.subplots()
        style = {"hue": "arm", "size": SIZE, "sizes": (16, 64), "palette": COLORS}
        sns.scatterplot(named(rows), x=x, y=y, **style, ax=axis)
        axis.set(xlabel=labels[x], ylabel=labels[y])
        move_legend(axis)
    return figure


def named(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the family, and the arms and the width by the names that the figures show."""
    parts = rows["arm"].str.rpartition("_")
    arms = pd.Categorical(parts[2].map(ARMS), [arm for arm in COLORS if arm in {ARMS[end] for end in parts[2]}])
    return rows.assign(family=parts[0], arm=arms).rename(columns={"width": SIZE})


def move_legend(axis: Axes) -> None:
    """Put an axis' legend beside it."""
    sns.move_legend(axis, "center left", bbox_to_anchor=(1.02, 0.5), frameon=False, title=None)
