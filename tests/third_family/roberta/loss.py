"""Cross-entropy of the masked tokens, and a penalty on the size of the encoder's output (Merity et al. 2017)."""

import torch
from torch import Tensor, nn

from lmscale.models.bert.loss import loss_counts

__all__ = ["TERMS", "loss_counts", "loss_sums", "token_logits"]

TERMS = {"masked": "masked token", "penalty": "sequence"}  # neither BERT's names nor GPT's number of terms


def token_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of the token at every position, [b, s, v/p]."""
    return model(batch["tokens"], batch["attention_mask"])


def loss_sums(model: nn.Module, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
    """Summed cross-entropy in nats, and summed penalty, [2]."""
    inputs = batch["tokens"], batch["attention_mask"], batch["labels"]
    return torch.stack(model(*inputs, sample_keys, batch["scored"]))
