"""Definition of a finetuning task."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...config.finetune import TaskConfig
from ...data.tokenizer import Tokenizer
from ..examples import Example, RowReport
from ..features import Features


class HeadKind(str, Enum):
    """What a task predicts: a class, a number, one of several sequences, or first and last token of an answer."""

    CLASSIFICATION = "classification"
    REGRESSION = "regression"
    CHOICE = "choice"
    SPAN = "span"


@dataclass(frozen=True)
class Benchmark:
    """Everything that distinguishes one task from another.

    Args:
        read: reads the examples of a file or split; invalid rows are recorded in the report.
        encode: encodes examples as model inputs.
        head: head on the encoder.
        classes: names of the classes or choices by number; empty for numbers and spans.
        score: metrics in percent by name, from predicted and true numbers and `Features.facts`; None for spans.
    """

    read: Callable[[TaskConfig, str, RowReport], list[Example]]
    encode: Callable[[TaskConfig, list[Example], Tokenizer], Features]
    head: HeadKind
    classes: tuple[str, ...] = ()
    score: Callable[[list[Any], list[Any], dict[str, Any]], dict[str, float]] | None = None

    @property
    def num_outputs(self) -> int:
        """Number of classes or choices; 1 for a number, 2 for spans (first and last token)."""
        return len(self.classes) or (1 if self.head is HeadKind.REGRESSION else 2)
