"""What all drawings share: the width of a column of the paper, and text that is readable there."""

from collections.abc import Iterator
from contextlib import contextmanager

import seaborn as sns

COLUMN_WIDTH, FONT_SIZE = 3.3, 8  # inches, points
PALETTE = {"paper": "0.25", "ours": "0.65"}  # dark and light enough to differ in grey


@contextmanager
def column_style(style: str = "ticks") -> Iterator[None]:
    """Seaborn's settings within the block; what was set before comes back."""
    sizes = {"font.size": FONT_SIZE, "axes.labelsize": FONT_SIZE, "axes.titlesize": FONT_SIZE}
    sizes |= dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), FONT_SIZE - 1)
    with sns.axes_style(style), sns.plotting_context("paper", rc=sizes):
        yield
