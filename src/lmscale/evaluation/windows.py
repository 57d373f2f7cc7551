"""Windows over a stream of tokens: every target is scored once, with as much context as a model's positions allow."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """How the targets of a stream are dealt out over windows that move by `stride`.

    The targets are the tokens but the first, numbered from 0. Window 0 scores its first `window` targets, each with
    what stands before it. Window i scores the `stride` targets behind those of window i - 1, with the last
    `window - stride` tokens and more before each. No window reaches past the last target.

    Args:
        num_targets: T.
        window: tokens a model reads at once.
        stride: targets that a window adds; the paper calls it overlap.

    Raises:
        ValueError: no target, or a stride outside 1 to `window`.

    Source: appendix E; NVIDIA/Megatron-LM v1.0 `tasks/zeroshot_gpt2/datasets.py` (`--overlapping-eval 32`).
    """

    num_targets: int
    window: int
    stride: int

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise ValueError(f"the text must have at least 2 tokens, but has {self.num_targets + 1}")
        if not 1 <= self.stride <= self.window:
            raise ValueError(f"`stride` must be at least 1 and at most `window` ({self.window}), but is {self.stride}")

    def __len__(self) -> int:
        """Windows that score something."""
        return 1 + math.ceil(max(self.num_targets - self.window, 0) / self.stride)

    @property
    def num_megatron(self) -> int:
        """Windows as Megatron-LM counts them: its last ones hold nothing that is not scored already."""
        return 1 + math.ceil(max(self.num_targets - self.stride, 0) / self.stride)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """Of a window the first token, how many tokens the model reads, and how many of their targets, the last ones,
        are scored."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.stride
        stop = min(first + self.window, self.num_targets)
        scored_before = 0 if index == 0 else first + self.window - self.stride
        return first, stop - first, stop - scored_before
