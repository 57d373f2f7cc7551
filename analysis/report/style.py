"""Style shared by all figures: widths, legible font sizes, and colours from seaborn's colour-blind palette."""

from collections.abc import Iterator
from contextlib import contextmanager

import seaborn as sns

COLUMN_WIDTH, PAGE_WIDTH, FONT_SIZE = 3.3, 8.0, 8  # inches (a page is 1,600 pixels wide), points
BLUE, ORANGE = sns.color_palette("colorblind").as_hex()[:2]
PALETTE = {"paper": "0.35", "ours": BLUE}


@contextmanager
def column_style(style: str = "ticks") -> Iterator[None]:
    """Apply the seaborn style within the block and restore the previous one."""
    sizes = {"font.size": FONT_SIZE, "axes.labelsize": FONT_SIZE, "axes.titlesize": FONT_SIZE}
    sizes |= dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), FONT_SIZE - 1)
    with sns.axes_style(style), sns.plotting_context("paper", rc=sizes):
        yield
