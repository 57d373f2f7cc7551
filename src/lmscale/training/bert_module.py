"""Pretraining BERT: masked language model and sentence order."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..parallel import IGNORE_LABEL
from ..parallel.argmax import vocab_parallel_argmax
from .step.module import PretrainModule


class BERTModule(PretrainModule):
    """Loss: cross-entropy of the masked tokens plus that of the sentence order, equally weighted (section 5.3).

    A micro-batch has `tokens`, `token_types` and `labels` (-100 where not masked), int64 [b, s]; `attention_mask` bool
    [b, s] or None; `sop_labels` int64 [b], 1 where the sentences are swapped; `scored` int64 [m], the places of the
    labels that are not -100; `sample_numbers` int64 [b].
    """

    loss_terms = ("lm", "order")

    def count_terms(self, batch: dict[str, Tensor]) -> Tensor:
        """Masked tokens and sequences, fp64 [2]."""
        masked = (batch["labels"] != IGNORE_LABEL).sum(dtype=torch.float64)
        return torch.stack([masked, torch.full_like(masked, len(batch["labels"]))])

    def sum_terms(self, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
        """Summed cross-entropies in nats, [2]."""
        inputs = batch["tokens"], batch["token_types"], batch["attention_mask"], batch["labels"]
        masked, order_logits = self.model(*inputs, sample_keys, batch["scored"])
        wide = order_logits.to(masked.dtype)  # fp32 for half types, like the token losses
        order = F.cross_entropy(wide, batch["sop_labels"], reduction="sum")
        return torch.stack([masked, order])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most probable token at every position, int64 [b, s], equal on all tensor ranks."""
        logits, _ = self.model(batch["tokens"], batch["token_types"], batch["attention_mask"])
        return vocab_parallel_argmax(logits.flatten(0, 1), self.parallel).view_as(batch["tokens"])
