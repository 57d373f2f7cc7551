"""Pretraining GPT: next-token prediction."""

import torch
from torch import Tensor

from ..parallel import IGNORE_LABEL
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
