"""The paper's Figures 2, 3, 4 and 8 and a pipeline as diagrams of what ran: shapes, messages, groups, times of ranks.

An event has `phase`, `what`, `kind` and `shape` (`notebooks/on_ranks.py`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.report.style import BLUE, ORANGE, house_style, page_figure

_SHOWN = ("VocabParallelEmbedding", "LayerNorm", "ColumnParallelLinear", "RowParallelLinear")
_LABELS = {
    "ColumnParallelLinear": "column-parallel linear",
    "RowParallelLinear": "row-parallel linear",
    "VocabParallelEmbedding": "word embedding",
}


def architecture(events: Iterable[Any], num_layers: int) -> Figure:
    """Figure 2: what a forward pass of a GPT computes, from bottom to top; what is cut is orange."""
    shown = [event for event in events if event.kind in _SHOWN]
    rows = [event for event in shown if "layers." not in event.what or "layers.0." in event.what]  # one layer
    with house_style("white"):
        figure = page_figure("Only the linear layers and the embedding of a GPT are cut", 3.8)
        axes = _empty(figure.subplots(), (-6, 16), (0, len(rows) + 0.5))
        in_layer = [i for i, event in enumerate(rows) if "layers." in event.what]
        _box(axes, 0.2, in_layer[0] + 0.05, 9.6, len(in_layer) - 0.05, "", BLUE, alpha=0.1)
        axes.text(10.1, in_layer[len(in_layer) // 2] + 0.5, f"x {num_layers}", va="center")
        for i, event in enumerate(rows):
            color = BLUE if event.kind == "LayerNorm" else ORANGE
            name = event.what.split(".")[-1].replace("_", " ")
            label = _LABELS.get(event.kind, event.kind)
            text = label if name == label else f"{name}: {label}"
            _box(axes, 1.2, i + 0.2, 7.6, 0.7, f"{text}  {_shape(event.shape)}", color)
            if i:
                axes.annotate("", (5, i + 0.25), (5, i - 0.15), arrowprops=_ARROW)
    return figure


def blocks(traces: dict[str, Sequence[Sequence[Any]]]) -> Figure:
    """Figure 3: the MLP and attention on two ranks, from left to right, with the shapes and messages of both passes.

    Args:
        traces: the events of each rank by the name of the block.
    """
    with house_style("white"):
        figure = page_figure("f and g are the only messages of the MLP and of attention", 3.9)
        for axes, (title, ranks) in zip(figure.subplots(2, 1), traces.items(), strict=True):
            _empty(axes, (-1.5, 20), (0, len(ranks) + 0.3)).set_title(title, loc="left")
            for lane, events in enumerate(reversed(ranks)):
                axes.text(-1.4, lane + 0.5, f"rank {len(ranks) - 1 - lane}", va="center")
                first, last = (e for e in events if e.phase == "forward" and e.kind.endswith("Linear"))
                inner = next(e for e in events if e.phase == "backward" and e.what == last.what)
                whole = next(e for e in events if e.phase == "backward" and e.what == first.what)
                texts = [
                    f"X  {_shape(whole.shape)}",
                    f"{first.what}: column-parallel\n{_shape(first.shape)}",
                    f"{'heads' if 'qkv' in first.what else 'GELU'}\n{_shape(inner.shape)}",
                    f"{last.what}: row-parallel\n{_shape(last.shape)}",
                    f"Z  {_shape(last.shape)}",
                ]
                colors = ["0.8", ORANGE, BLUE, ORANGE, "0.8"]
                for i, (text, color) in enumerate(zip(texts, colors, strict=True)):
                    _box(axes, 0.2 + 4.0 * i, lane + 0.15, 3.2, 0.7, text, color)
                    if i:
                        axes.annotate("", (0.2 + 4.0 * i, lane + 0.5), (-0.6 + 4.0 * i, lane + 0.5), arrowprops=_ARROW)
            for x, name, phase in ((3.8, "f", "backward"), (15.8, "g", "forward")):
                sent = next(e for e in ranks[0] if e.kind == "message" and e.phase == phase)
                axes.plot([x, x], [0.1, len(ranks) - 0.1], color="black", linewidth=3)
                axes.text(x, len(ranks) - 0.05, f"{name}: {phase}, {sent.num_bytes} bytes", ha="center", va="bottom")
    return figure


def layer_messages(events: Sequence[Any]) -> Figure:
    """Figure 4: the messages of one layer, forward from left to right, then backward from right to left."""
    shown = ("LayerNorm", "SelfAttention", "MLP", "message")
    with house_style("white"):
        figure = page_figure("A layer sends two all-reduces forward and two backward", 2.3)
        axes = _empty(figure.subplots(), (0, 14), (0, 2.2))
        for y, phase in ((1.2, "forward"), (0.1, "backward")):
            steps = [e for e in events if e.phase == phase and e.kind in shown]
            order, inside = [], []
            for step in steps:  # a module is noted when it ends, after its message, which is its last action
                if step.kind == "message":
                    inside.append(step)
                else:
                    order, inside = [*order, step, *inside], []
            order = order if phase == "forward" else order[::-1]
            axes.text(0.1, y + 0.35, phase, va="center", fontweight="bold")
            for i, step in enumerate(order):
                is_message = step.kind == "message"
                label = f"{step.what}\n{_shape(step.shape)}" if is_message else step.what.replace("_", " ")
                _box(axes, 2.0 + 2.0 * i, y, 1.7, 0.7, label, ORANGE if is_message else BLUE)
            ends = ((1.8, y + 0.8), (2.0 * len(order) + 1.8, y + 0.8))
            axes.annotate("", *(ends[::-1] if phase == "forward" else ends), arrowprops=_ARROW)
    return figure


def groups(ranks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Figure:
    """Figure 8: the tensor groups (rows) and the data groups (columns) that the ranks reported.

    Args:
        ranks: of each rank the numbers in its tensor group and in its data group.
    """
    tensor = sorted({tuple(pair[0]) for pair in ranks})
    data = sorted({tuple(pair[1]) for pair in ranks})
    with house_style("white"):
        figure = page_figure("Tensor ranks are neighbours; data groups join equal places", 2.1)
        axes = _empty(figure.subplots(), (-3, len(data) + 3), (-0.6, len(tensor)))
        for row, members in enumerate(reversed(tensor)):
            _box(axes, 0, row + 0.25, len(data) - 0.1, 0.5, "", BLUE, alpha=0.2)
            axes.text(-0.1, row + 0.5, f"tensor group {list(members)}", ha="right", va="center")
            for member in members:
                column = next(i for i, group in enumerate(data) if member in group)
                axes.text(column + 0.45, row + 0.5, f"rank {member}", ha="center", va="center")
        for column, members in enumerate(data):
            _box(axes, column + 0.12, 0, 0.66, len(tensor), "", ORANGE, alpha=0.2)
            axes.text(column + 0.45, -0.1, f"data group\n{list(members)}", ha="center", va="top")
    return figure


def timeline(stages: Sequence[Sequence[tuple[str, int, float, float]]], what: str) -> Figure:
    """The passes of a pipeline as they ran, over time, by micro-batch; forward is blue, backward orange.

    Args:
        stages: of each stage (`F` or `B`, micro-batch, start, end) of every pass; times in seconds, of one clock.
        what: the stages, for the title.
    """
    num, start = len(stages[0]) // 2, min(begin for passes in stages for *_, begin, _ in passes)
    span = max(end for passes in stages for *_, end in passes) - start
    busy = sum(end - begin for passes in stages for *_, begin, end in passes)
    idle, formula = 1 - busy / (len(stages) * span), (len(stages) - 1) / (num + len(stages) - 1)
    title = f"{what} are idle for {idle:.0%} of a step; (p - 1) / (m + p - 1) is {formula:.0%}"
    with house_style("white"):
        figure = page_figure(title, 0.9 + 0.35 * len(stages))
        axes = figure.subplots()
        for stage, passes in enumerate(stages):
            for name, index, begin, end in passes:
                y, color = len(stages) - 1 - stage, BLUE if name == "F" else ORANGE
                _box(axes, begin - start, y + 0.1, end - begin, 0.8, str(index), color)
        labels = [f"stage {stage}" for stage in reversed(range(len(stages)))]
        axes.set(xlim=(0, span), ylim=(0, len(stages)), xlabel="time, s", yticks=[i + 0.5 for i in range(len(stages))])
        axes.set_yticklabels(labels)
    return figure


_ARROW = {"arrowstyle": "->", "color": "0.3"}


def _empty(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> Axes:
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return axes


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, alpha: float = 0.5
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=alpha, edgecolor="0.3", linewidth=0.5))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7)


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
