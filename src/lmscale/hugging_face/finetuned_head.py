"""What a conversion needs to know of a finetuned model's head, which `lmscale.finetune` describes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import TransformerConfig


@dataclass(frozen=True)
class FinetunedHead:
    """The head of a finetuned model.

    Args:
        kind: `classification`, `regression`, `choice` or `span`.
        classes: of a classification, by number.
        build: our model of a configuration with this head on the meta device, with the outputs of transformers.
    """

    kind: str
    classes: tuple[str, ...]
    build: Callable[[TransformerConfig], nn.Module]

    @property
    def settings(self) -> dict[str, Any]:
        """Its keys of `config.json`."""
        if self.kind == "regression":  # without its type, a pipeline would apply a sigmoid
            return {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
        if not self.classes:
            return {}
        numbers = {name: number for number, name in enumerate(self.classes)}
        names = dict(enumerate(self.classes))
        return {"id2label": names, "label2id": numbers, "problem_type": "single_label_classification"}


@dataclass(frozen=True)
class PublishedHead(FinetunedHead):
    """The head of a checkpoint that is exported, with what the tokenizer and the model card say of its task.

    Args:
        max_seq_length: tokens of an input in training at most.
        dropout: before the linear layer; None: the hidden one, or none.
        pipeline_tag: name of the task on the hub.
        training, scores: rows of tables.
        example: Python code that loads the model from FOLDER.
    """

    max_seq_length: int
    dropout: float | None
    pipeline_tag: str
    training: dict[str, Any]
    scores: dict[str, str]
    example: str
