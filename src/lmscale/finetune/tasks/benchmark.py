"""Definition of a finetuning task."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...config.finetune import TaskConfig
from ...data.tokenizer import Tokenizer
from ..examples import Example, RowReport
from ..features import Features


def accuracy(chosen: list[int], labels: list[int]) -> float:
    """Compute the fraction of correct predictions, in percent."""
    return 100.0 * sum(a == b for a, b in zip(chosen, labels, strict=True)) / len(labels)


class HeadKind(str, Enum):
    """What a task predicts: a class of a pair, one of several sequences, or first and last token of an answer."""

    CLASSIFICATION = "classification"
    CHOICE = "choice"
    SPAN = "span"


@dataclass(frozen=True)
class Benchmark:
    """Everything that distinguishes one task from another.

    Args:
        objective: metric that a search and the median over seeds compare.
        read: reads the examples of a file or split; invalid rows are recorded in the report.
        encode: encodes examples as model inputs.
        head: head on the encoder.
        classes: names of the classes or choices by number; empty for spans.
        score: metrics in percent by name, from predicted and true numbers and `Features.facts`; None for spans.
        file_name: classification: name of the submission file of a set.
    """

    objective: str
    read: Callable[[TaskConfig, str, RowReport], list[Example]]
    encode: Callable[[TaskConfig, list[Example], Tokenizer], Features]
    head: HeadKind
    classes: tuple[str, ...] = ()
    score: Callable[[list[int], list[int], dict[str, Any]], dict[str, float]] | None = None
    file_name: Callable[[str], str] | None = None

    @property
    def num_outputs(self) -> int:
        """Number of classes or choices; 2 for spans (first and last token)."""
        return len(self.classes) or 2
