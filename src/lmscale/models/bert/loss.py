"""BERT's training loss: cross-entropy of the masked tokens plus that of the sentence order (section 5.3).

A micro-batch has `tokens`, `token_types` and `labels` (-100 where not masked), int64 [b, s]; `attention_mask` bool
[b, s] or None; `sop_labels` int64 [b], 1 where the sentences are swapped; `scored` int64 [m], the indices of flattened
labels that are not -100.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...parallel import IGNORE_LABEL

TERMS = {"lm": "masked token", "order": "sequence"}  # of what each loss is a mean; equally weighted


def loss_counts(batch: dict[str, Tensor]) -> Tensor:
    """Masked tokens and sequences, fp64 [2]."""
    masked = (batch["labels"] != IGNORE_LABEL).sum(dtype=torch.float64)
    return torch.stack([masked, torch.full_like(masked, len(batch["labels"]))])


def token_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of the token at every position, [b, s, v/p]."""
    return model(batch["tokens"], batch["token_types"], batch["attention_mask"])[0]


def loss_sums(model: nn.Module, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
    """Summed cross-entropies in nats, [2]; communicates as the model does."""
    inputs = batch["tokens"], batch["token_types"], batch["attention_mask"], batch["labels"]
    masked, order_logits = model(*inputs, sample_keys, batch["scored"])
    wide = order_logits.to(masked.dtype)  # fp32 for half types, like the token losses
    return torch.stack([masked, F.cross_entropy(wide, batch["sop_labels"], reduction="sum")])
