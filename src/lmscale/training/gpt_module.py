"""Pretraining GPT: next-token prediction."""

import torch
from torch import Tensor

from ..parallel import IGNORE_LABEL
from ..parallel.argmax import vocab_parallel_argmax
from .step.module import PretrainModule


class GPTModule(PretrainModule):
    """Loss: cross-entropy of the next token (section 5.2).

    A micro-batch has `tokens` and `labels`, int64 [b, s], and `sample_numbers` int64 [b].
    """

    loss_terms = ("lm",)

    def count_terms(self, batch: dict[str, Tensor]) -> Tensor:
        """Scored tokens, fp64 [1]."""
        return (batch["labels"] != IGNORE_LABEL).sum(dtype=torch.float64).unsqueeze(0)

    def sum_terms(self, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
        """Summed cross-entropy in nats, [1]."""
        return self.model(batch["tokens"], batch["labels"], sample_keys).unsqueeze(0)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most probable next token of every position, int64 [b, s], equal on all tensor ranks."""
        logits = self.model(batch["tokens"])
        return vocab_parallel_argmax(logits.flatten(0, 1), self.parallel).view_as(batch["tokens"])
