"""What a task consists of."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...config.finetune import TaskConfig
from ...data.tokenizer import Tokenizer
from ..examples import Example, RowAccount
from ..features import Features


class HeadKind(str, Enum):
    """What a task predicts: a class of a pair, one of several sequences, first and last token of an answer."""

    CLASSIFICATION = "classification"
    CHOICE = "choice"
    SPAN = "span"


@dataclass(frozen=True)
class Benchmark:
    """All that sets one task apart from another.

    Args:
        read: from a place to its examples; rows that cannot be go into the account.
        encode: from examples to inputs; the texts are notes to keep with them.
        head: what stands on the encoder.
        classes: names of what is chosen from, by number; none for spans.
        score: metrics in percent of chosen numbers and right ones, with what else `encode` has kept; none for spans.
        file_name: classification: the submitted file of a set, by the set's name.
        objective: the metric that a search, and the median of several seeds, look at.
    """

    read: Callable[[TaskConfig, str, RowAccount], list[Example]]
    encode: Callable[[TaskConfig, list[Example], Tokenizer, list[str]], Features]
    head: HeadKind
    classes: tuple[str, ...] = ()
    score: Callable[[list[int], list[int], dict[str, Any]], dict[str, float]] | None = None
    file_name: Callable[[str], str] | None = None
    objective: str = "accuracy"

    @property
    def num_outputs(self) -> int:
        """Classes, choices, or for spans 2: first and last token."""
        return len(self.classes) or 2
