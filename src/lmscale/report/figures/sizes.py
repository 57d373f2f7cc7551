"""Where the parameters of the paper's models are, and the memory wall that model parallelism moves."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from .style import COLUMN_WIDTH, column_style

_PARTS = {"layers": "0.3", "embeddings": "0.65", "other": "0.9"}  # lightness
_HATCHES = {"layers": "", "embeddings": "//", "other": ".."}


def draw_parts(rows: pd.DataFrame) -> Figure:
    """Share of the layers, the embeddings and the rest in each model.

    Args:
        rows: of `parameter_table`.
    """
    with column_style():
        figure = Figure(figsize=(COLUMN_WIDTH, 2.8), layout="constrained")
        axis = figure.subplots()
        left = pd.Series(0.0, index=rows.index)
        for part, color in _PARTS.items():
            share = 100 * rows[part] / rows["total"]
            axis.barh(rows["model"], share, left=left, color=color, edgecolor="black", linewidth=0.4, label=part)
            for bar in axis.containers[-1]:
                bar.set_hatch(_HATCHES[part])
            left += share
        axis.invert_yaxis()
        axis.set(xlabel="% of the parameters", xlim=(0, 100))
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        sns.despine(figure)
    return figure


def draw_memory_wall(rows: pd.DataFrame, devices: dict[str, float]) -> Figure:
    """Memory of a rank over the tensor size with full recomputation, and what devices have.

    Args:
        rows: of `memory_table`.
        devices: GiB by name.
    """
    rows = rows[(rows["recompute"] == "full") & rows["model"].str.startswith("gpt")]
    tall = rows.melt("model", [column for column in rows if column.startswith("tp ")], "tp", "GiB").dropna()
    tall["tensor ranks"] = tall["tp"].str.removeprefix("tp ").astype(int)
    with column_style():
        figure = Figure(figsize=(COLUMN_WIDTH, 3.0), layout="constrained")
        axis = figure.subplots()
        look = {"hue": "model", "style": "model", "markers": True, "palette": "Greys_d"}
        sns.lineplot(tall, x="tensor ranks", y="GiB", ax=axis, **look)
        for name, gib in devices.items():
            axis.axhline(gib, color="0.4", linewidth=0.8, linestyle=":")
            axis.text(8.2, gib, name, fontsize=6.5, va="center")
        sizes = sorted(tall["tensor ranks"].unique())
        axis.set(xscale="log", yscale="log", ylabel="GiB of a rank")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_yticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        axis.minorticks_off()
        handles, labels = axis.get_legend_handles_labels()
        axis.get_legend().remove()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        sns.despine(figure)
    return figure
