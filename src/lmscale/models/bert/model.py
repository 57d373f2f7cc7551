"""BERT with masked-LM and sentence-order heads: the bidirectional model of section 5.3."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import TransformerConfig
from ...parallel import (
    IGNORE_LABEL,
    LayerNorm,
    ParallelContext,
    ReplicatedLinear,
    SoftTargets,
    describe_parameters,
    linear_cross_entropy,
    parameter,
    vocab_parallel_logits,
)
from ..language_model import LanguageModel
from ..parametrization import scaled


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm (replicated), then the tied projection with a bias cut over the vocabulary.

    Shapes:
        hidden [..., h]; word_embedding [v/p, h]; returns logits [..., v/p].

    Communicates:
        backward one all-reduce of [..., h] over the tensor group (f of the projection).

    Source: Devlin et al. 2018; section 3 for the cut.
    """

    extra_repr = describe_parameters

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.config, self.context, self.output_factor = config, context, config.scaling.output_factor
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size, context, config.initializer_std)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, context, grad_is_partial=False)
        self.bias = parameter(context, (config.padded_vocab_size,), shard_dim=0)

    def forward(self, hidden: Tensor, word_embedding: Tensor) -> Tensor:
        hidden = self.transform(hidden)
        return vocab_parallel_logits(hidden, word_embedding, self.bias, self.config.vocab_size, self.context)

    def transform(self, hidden: Tensor) -> Tensor:
        """The head before the output projection, [..., h] to [..., h]."""
        approximation = "tanh" if self.config.gelu_form == "tanh" else "none"
        return scaled(self.norm(F.gelu(self.dense(hidden), approximate=approximation)), self.output_factor)

    def sum_losses(
        self,
        rows: Tensor,
        word_embedding: Tensor,
        labels: Tensor,
        compiles: bool,
        targets: SoftTargets | None = None,
    ) -> Tensor:
        """See `linear_cross_entropy`; rows [n, h], labels int64 [n]."""
        inputs = self.transform(rows), word_embedding, self.bias, labels, self.config.vocab_size
        return linear_cross_entropy(*inputs, self.context, compiles, targets)


class BERT(LanguageModel):
    """Bidirectional encoder with pooler, masked-LM head and sentence-order head.

    With labels the masked-LM head computes only the scored positions, 15 % of all.

    Shapes:
        tokens int64 [b, s]; token_types int64 [b, s], or None for zeros; attention_mask bool or 0 and 1 [b, s], true
        for real tokens, or None; labels int64 [b, s] with -100 where not masked, or None; sample_keys int32 [b] of the
        dropout masks, or None where one process draws them; scored int64 [m], the indices of flattened labels that are
        not -100, or None: the model finds them, and the host waits for a GPU. Returns (logits [b, s, v/p] without
        labels, else what `linear_cross_entropy` does of the scored positions; sentence-order logits [b, 2]).

    Args:
        targets: of a teacher, for the scored positions.

    Communicates:
        over the tensor group: the transformer's; backward one all-reduce of the tied projection, of [b, s, h], with
        labels of [m, h]; with labels, forward three of [m], in chunks (`linear_cross_entropy`).

    Source: sections 3 and 5.3; Devlin et al. 2018; sentence order from Lan et al. 2019 (ALBERT).
    """

    def add_heads(self) -> None:
        """Create the pooler and both heads."""
        hidden, std = self.config.hidden_size, self.config.initializer_std
        self.pooler = ReplicatedLinear(hidden, hidden, self.context, std)
        self.lm_head = MaskedLanguageModelHead(self.config, self.context)
        self.order_head = ReplicatedLinear(hidden, 2, self.context, std, role="readout")

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sample_keys: Tensor | None = None,
        scored: Tensor | None = None,
        targets: SoftTargets | None = None,
    ) -> tuple[Tensor, Tensor]:
        if token_types is None:
            token_types = torch.zeros_like(tokens)
        hidden = self.transformer(tokens, token_types, attention_mask, sample_keys)
        first = hidden[:, 0].contiguous()  # a view would keep all of `hidden` for the backward pass
        order_logits = self.order_head(scaled(self.pooler(first).tanh(), self.config.scaling.output_factor))
        if labels is None:
            return self.logits(hidden), order_logits
        if scored is None:
            scored = scored_positions(labels)
        rows = hidden.flatten(0, 1).index_select(0, scored)
        labels, weight = labels.flatten().index_select(0, scored), self.transformer.word_embedding.weight
        loss = self.lm_head.sum_losses(rows, weight, labels, self.compiles, targets)
        return loss, order_logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every word from the masked-LM head, [..., h] to [..., v/p]."""
        return self.lm_head(hidden, self.transformer.word_embedding.weight)


def scored_positions(labels: Tensor) -> Tensor:
    """Indices of flattened labels that are not -100; labels int64 [b, s]; returns int64 [m]."""
    return (labels.flatten() != IGNORE_LABEL).nonzero().squeeze(1)
