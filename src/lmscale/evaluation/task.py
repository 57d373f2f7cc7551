"""What a zero-shot task is: the items of a file, their scores under a model, and the metrics of these."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..config import TransformerConfig
from ..config.zero_shot import TaskConfig
from ..data.tokenizer import Tokenizer
from ..models.language_model import LanguageModel
from ..paper import GPT_SIZES, GPT_VOCABULARY, STEPS
from ..parallel.data_collectives import sum_over_data_ranks
from ..text.whole_file import TextFile, read_text_file

Metrics = dict[str, tuple[float, str]]  # value and unit by the name in the record


@dataclass(frozen=True)
class Task(ABC):
    """A task's file, read and tokenized; each task is a subclass in a file of its own.

    Args:
        file_name: for messages and the record.
        file_sha256: of the stored bytes.
        split: the published file that it is, otherwise `other`.
    """

    needs_causal: ClassVar[bool] = True  # of the model: each token is predicted from those before it
    detokenizer: ClassVar[str] = "none"  # for the record
    num_scores: ClassVar[int] = 1  # of an item
    file_name: str
    file_sha256: str
    split: str

    @classmethod
    @abstractmethod
    def read(cls, config: TaskConfig, tokenizer: Tokenizer) -> Self:
        """Read and tokenize the file.

        Raises:
            ValueError: it cannot be scored.
        """

    @abstractmethod
    def for_model(self, model: TransformerConfig) -> Self:
        """Return the task as this model reads it.

        Raises:
            ValueError: the model cannot, mostly because it has too few positions.
        """

    @property
    @abstractmethod
    def follows_paper(self) -> bool:
        """Whether the protocol is that of Table 3; `split` says whether the file is."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Return the counts on which the metrics depend."""

    @abstractmethod
    def batches(self, micro_batch_tokens: int) -> list[list[int]]:
        """Group the indices of all items into batches of at most so many tokens, unless one item has more."""

    @abstractmethod
    def score_batch(self, model: LanguageModel, batch: list[int]) -> Tensor:
        """Score the items with these indices.

        Shapes:
            returns fp64 [b, num_scores] on the model's device, equal on all tensor ranks.
        """

    @abstractmethod
    def nan_message(self, index: int) -> str:
        """Return the error message of an item whose score is not a number."""

    @abstractmethod
    def metrics(self, scores: list[list[float]]) -> Metrics:
        """Compute every metric."""

    def answers(self, scores: list[list[float]]) -> list[Any]:
        """Return a dataclass per item for `answers.jsonl`; empty: there is no such file."""
        return []

    def score(
        self, model: LanguageModel, micro_batch_tokens: int, on_batch: Callable[[int], None] = lambda number: None
    ) -> list[list[float]]:
        """Score every item; the scores are equal on all ranks.

        Batches are the same at every layout and each is processed by one data rank, so results do not depend on
        `dp_size`.

        Args:
            on_batch: called with the number of items of each finished batch of this rank.

        Raises:
            ValueError: a score is not a number.

        Communicates:
            over the tensor group, see `score_places`; over the data group one all-reduce of all scores.
        """
        context, device = model.context, model.transformer.position_embedding.device
        batches = self.batches(micro_batch_tokens)
        num_items = sum(map(len, batches))
        table = torch.zeros(num_items, 1 + self.num_scores, dtype=torch.float64, device=device)
        for batch in batches[context.dp_rank :: context.dp_size]:
            table[batch, 0] = 1
            table[batch, 1:] = self.score_batch(model, batch)
            on_batch(len(batch))
        sum_over_data_ranks(table, context)
        assert bool((table[:, 0] == 1).all())  # every item exactly once
        scores = table[:, 1:].tolist()
        for index, found in enumerate(scores):
            if any(map(math.isnan, found)):
                raise ValueError(self.nan_message(index))
        return scores

    def record_kind(self, model: TransformerConfig, step: int) -> tuple[str, str | None]:
        """Return the kind of this evaluation's record and the paper's name of the model's size.

        Returns:
            `run` if model size, steps, file and protocol are those of Table 3, otherwise `scaled_down`; and the name,
            None if the paper has no model of this size.
        """
        shape = (model.num_layers, model.hidden_size, model.num_attention_heads)
        paper_size = next((name for name, paper in GPT_SIZES.items() if paper == shape), None)
        form = (model.vocab_size, model.norm_order, model.parametrization)
        is_model = paper_size is not None and step == STEPS and form == (GPT_VOCABULARY, "pre", "standard")
        return "run" if is_model and self.split == "test" and self.follows_paper else "scaled_down", paper_size


def read_complete_file(path: str) -> TextFile:
    """Read a task's file; damage would change its counts of words and tokens, and so the number.

    Raises:
        ValueError: see `read_text_file`; or it has no word, or ends in the middle of a line.
    """
    file = read_text_file(path, "task.path")
    if not file.text.strip():
        raise ValueError(f"`task.path` must be a file with text, but {file.name} is empty")
    if not file.text.endswith("\n"):
        line = file.text.count("\n") + 1
        raise ValueError(f"`task.path` must end with a line end, but {file.name}, line {line} is cut off")
    return file


def perplexity(loss_sum: float, count: int) -> float:
    """exp(loss / count); infinite if that is too large for a number, or if nothing is counted.

    Args:
        loss_sum: total loss of a text, in nats.
        count: T_o, the words of the raw text, in the formula of appendix E; T_o - 1 in Megatron-LM's code (which also
            caps the exponent at 20); or T, the predicted subwords, which depends on the tokenizer.
    """
    try:
        return math.exp(loss_sum / count) if count > 0 else math.inf
    except OverflowError:
        return math.inf
