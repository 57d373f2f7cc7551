"""BERT's training loss: cross-entropy of the masked tokens plus that of the sentence order (section 5.3).

A micro-batch has `tokens`, `token_types` and `labels` (-100 where not masked), int64 [b, s]; `attention_mask` bool
[b, s] or None; `sop_labels` int64 [b], 1 where the sentences are swapped; `scored` int64 [m], the indices of flattened
labels that are not -100; and `targets` if it has a teacher's.
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
    """Summed cross-entropies in nats, and with `targets` the divergence, [2] or [3]; communicates as the model does."""
    inputs = batch["tokens"], batch["token_types"], batch["attention_mask"], batch["labels"]
    masked, order_logits = model(*inputs, sample_keys, batch["scored"], batch.get("targets"))
    wide = order_logits.to(masked.dtype)  # fp32 for half types, like the token losses
    order = F.cross_entropy(wide, batch["sop_labels"], reduction="sum")
    return torch.stack([*masked.reshape(-1)[:1], order, *masked.reshape(-1)[1:]])


def output_projection(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of the logits of the masked positions: rows [m, h], word embedding [v/p, h], bias [v/p]."""
    hidden = model.transformer(batch["tokens"], batch["token_types"], batch["attention_mask"])
    rows = model.lm_head.transform(hidden.flatten(0, 1).index_select(0, batch["scored"]))
    return rows, model.transformer.word_embedding.weight, model.lm_head.bias
