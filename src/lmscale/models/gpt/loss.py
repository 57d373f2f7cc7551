"""GPT's training loss: cross-entropy of the next token (section 5.2).

A micro-batch has `tokens` and `labels`, int64 [b, s], and `targets` if it has a teacher's.
"""

import torch
from torch import Tensor, nn

from ...parallel import IGNORE_LABEL
from ..parametrization import scaled

TERMS = {"lm": "token"}  # of what each loss is a mean


def loss_counts(batch: dict[str, Tensor]) -> Tensor:
    """Scored tokens, fp64 [1]."""
    return (batch["labels"] != IGNORE_LABEL).sum(dtype=torch.float64).unsqueeze(0)


def token_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of the next token at every position, [b, s, v/p]."""
    return model(batch["tokens"])


def loss_sums(model: nn.Module, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
    """Summed cross-entropy in nats, and with `targets` the divergence, [1] or [2]; communicates as the model does."""
    return model(batch["tokens"], batch["labels"], sample_keys, targets=batch.get("targets")).reshape(-1)


def output_projection(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of the logits of every position: rows [b s, h], word embedding [v/p, h], no bias."""
    rows = model.transformer(batch["tokens"]).flatten(0, 1)
    return scaled(rows, model.config.scaling.output_factor), model.transformer.word_embedding.weight, None
