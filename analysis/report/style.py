"""Style shared by all figures: the width of a column of the paper, and legible font sizes."""

from collections.abc import Iterator
from contextlib import contextmanager

import seaborn as sns

COLUMN_WIDTH, FONT_SIZE = 3.3, 8  # inches, points
PALETTE = {"paper": "0.25", "ours": "0.65"}  # distinguishable in grayscale


@contextmanager
def column_style(style: str = "ticks") -> Iterator[None]:
    """Apply the seaborn style within the block and restore the previous one."""
    sizes = {"font.size": FONT_SIZE, "axes.labelsize": FONT_SIZE, "axes.titlesize": FONT_SIZE}
    sizes |= dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), FONT_SIZE - 1)
    with sns.axes_style(style), sns.plotting_context("paper", rc=sizes):
        yield
