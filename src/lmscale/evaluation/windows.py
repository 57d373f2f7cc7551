"""Sliding windows over a token stream: every target is scored once, with as much context as the positions allow."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """Assignment of the targets of a stream to windows that advance by `stride`.

    The targets are all tokens except the first, numbered from 0. Window 0 scores the first `window` targets, each with
    all preceding tokens as context. Window i scores the `stride` targets after those of window i - 1, each with at
    least `window - stride` tokens of context. No window extends beyond the last target.

    Args:
        num_targets: T.
        window: number of tokens the model reads at once.
        stride: number of new targets per window, at most `window`; the paper calls it overlap.

    Raises:
        ValueError: there is no target.

    Source: appendix E; NVIDIA/Megatron-LM v1.0 `tasks/zeroshot_gpt2/datasets.py` (`--overlapping-eval 32`).
    """

    num_targets: int
    window: int
    stride: int

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise ValueError(f"the text must have at least 2 tokens, but has {self.num_targets + 1}")

    def __len__(self) -> int:
        """Number of windows that score at least one target."""
        return 1 + math.ceil(max(self.num_targets - self.window, 0) / self.stride)

    @property
    def num_megatron(self) -> int:
        """Number of windows in Megatron-LM, whose last windows contain only targets that are scored already."""
        return 1 + math.ceil(max(self.num_targets - self.stride, 0) / self.stride)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """Return a window's first token, its number of input tokens, and how many of their last targets are scored."""
        first = index * self.stride
        stop = min(first + self.window, self.num_targets)
        scored_before = 0 if index == 0 else first + self.window - self.stride
        return first, stop - first, stop - scored_before
