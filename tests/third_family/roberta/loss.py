"""Cross-entropy of the masked tokens."""

from torch import Tensor, nn

from lmscale.models.gpt.loss import TERMS, loss_counts

__all__ = ["TERMS", "loss_counts", "loss_sums", "token_logits"]


def token_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of the token at every position, [b, s, v/p]."""
    return model(batch["tokens"], batch["attention_mask"])


def loss_sums(model: nn.Module, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
    """Summed cross-entropy in nats, [1]."""
    inputs = batch["tokens"], batch["attention_mask"], batch["labels"]
    return model(*inputs, sample_keys, batch["scored"]).unsqueeze(0)
