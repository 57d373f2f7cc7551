"""GPT's training loss: cross-entropy of the next token (section 5.2).

A micro-batch has `tokens` and `labels`, int64 [b, s].
"""

import torch
from torch import Tensor, nn

from ...parallel import IGNORE_LABEL

TERMS = {"lm": "token"}  # of what each loss is a mean


def loss_counts(batch: dict[str, Tensor]) -> Tensor:
    """Scored tokens, fp64 [1]."""
    return (batch["labels"] != IGNORE_LABEL).sum(dtype=torch.float64).unsqueeze(0)


def token_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of the next token at every position, [b, s, v/p]."""
    return model(batch["tokens"])


def loss_sums(model: nn.Module, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
    """Summed cross-entropy in nats, [1]; communicates as the model does."""
    return model(batch["tokens"], batch["labels"], sample_keys).unsqueeze(0)
