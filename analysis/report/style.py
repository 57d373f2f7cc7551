"""House style of all figures: 1,600 pixels wide, the finding as title, a colour-blind palette, a white ground."""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGE_WIDTH, DPI, FONT_SIZE = 8.0, 200, 9  # inches, pixels per inch, points
TITLE_WIDTH = 85  # characters
BLUE, ORANGE = "#0173b2", "#ad5f00"  # of seaborn's colour-blind palette; the orange is darker, to be legible as text
GREEN, PINK, GREY = "#00795a", "#b0559d", "#6b7683"
PALETTE = {"paper": GREY, "ours": BLUE}


def prepare_figure(option: str, path: Path) -> None:
    """Check the path of a figure from a command line, before the work, and make its folder.

    Raises:
        ValueError: a suffix that matplotlib cannot write, or a folder that cannot be made.
    """
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:] not in known:
        raise ValueError(f"`{option}` must end in one of {', '.join(known)}, but is {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`{option}` must be in a folder that can be made, but {path}: {error.strerror}") from None


@contextmanager
def house_style(style: str = "ticks") -> Iterator[None]:
    """Apply the seaborn style within the block and restore the previous one.

    With `ticks`, axes have no line at the top and on the right.
    """
    sizes = {"font.size": FONT_SIZE, "axes.labelsize": FONT_SIZE, "axes.titlesize": FONT_SIZE}
    sizes |= dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), FONT_SIZE - 1)
    closed = dict.fromkeys(("axes.spines.top", "axes.spines.right"), style != "ticks")
    with sns.axes_style(style, rc=closed), sns.plotting_context("paper", rc=sizes):
        yield


def page_figure(title: str, height: float) -> Figure:
    """An empty figure of the page's width with a title that states the finding, in lines that fit the page."""
    figure = Figure(figsize=(PAGE_WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH), x=0.012, ha="left", weight="bold", fontsize=FONT_SIZE + 2)
    return figure


def label_ends(axis: Axes, ends: Mapping[str, tuple[float, float, object]], gap: float = 0.065) -> None:
    """Write labels right of the ends of lines, apart from each other.

    Args:
        ends: x, y and colour by label.
        gap: least distance of two labels, as a share of the axis' height.
    """
    axis.get_ylim()  # scales the axis to what is drawn
    to_axis = axis.transData.transform, axis.transAxes.inverted().transform
    heights = {label: to_axis[1](to_axis[0]((x, y)))[1] for label, (x, y, _) in ends.items()}
    order = sorted(heights, key=heights.get)
    for below, above in zip(order, order[1:], strict=False):
        heights[above] = max(heights[above], heights[below] + gap)
    room = 1.0
    for label in reversed(order):
        place = min(heights[label], room)
        room = place - gap
        axis.text(1.01, place, label, transform=axis.transAxes, color=ends[label][2], va="center")
