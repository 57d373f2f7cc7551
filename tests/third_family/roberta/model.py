"""The encoder with its masked-LM head."""

from torch import Tensor

from lmscale.models.bert.model import MaskedLanguageModelHead
from lmscale.models.language_model import LanguageModel


class RoBERTa(LanguageModel):
    """Bidirectional encoder with a masked-LM head.

    Shapes:
        as `BERT`; returns logits [b, s, v/p] without labels, else the sum of the losses in nats and of the penalties.
    """

    def add_heads(self) -> None:
        """The masked-LM head."""
        self.lm_head = MaskedLanguageModelHead(self.config, self.context)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sample_keys: Tensor | None = None,
        scored: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.transformer(tokens, attention_mask=attention_mask, sample_keys=sample_keys)
        weight = self.transformer.word_embedding.weight
        if labels is None:
            return self.lm_head(hidden, weight)
        rows, labels = (tensor.flatten(0, 1).index_select(0, scored) for tensor in (hidden, labels))
        penalty = hidden.square().mean(dim=(1, 2)).sum()
        return self.lm_head.sum_losses(rows, weight, labels, self.compiles), penalty
