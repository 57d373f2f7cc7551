"""BERT with masked-LM and sentence-order heads: the bidirectional model of section 5.3."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from ..parallel import (
    LayerNorm,
    ParallelContext,
    ReplicatedLinear,
    parameter,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
)
from .transformer import Transformer


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm (replicated), then the tied projection with a bias cut over the vocabulary.

    Shapes:
        hidden [b, s, h]; word_embedding [v/p, h]; returns logits [b, s, v/p].

    Communicates:
        backward one all-reduce of [b, s, h] over the tensor group (f of the projection).

    Source: Devlin et al. 2018; section 3 for the cut.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size, context, config.initializer_std)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, context)
        self.bias = parameter(context, (config.padded_vocab_size,), shard_dim=0)

    def forward(self, hidden: Tensor, word_embedding: Tensor) -> Tensor:
        approximation = "tanh" if self.config.gelu_form == "tanh" else "none"
        hidden = self.norm(F.gelu(self.dense(hidden), approximate=approximation))
        return vocab_parallel_logits(hidden, word_embedding, self.bias, self.config.vocab_size, self.context)


class BERT(nn.Module):
    """Bidirectional encoder with pooler, masked-LM head and sentence-order head.

    Shapes:
        tokens, token_types int64 [b, s]; attention_mask bool [b, s], True for real tokens, or None; labels int64
        [b, s] with -100 where not masked, or None; sample_keys int32 [b], needed in training with dropout. Returns
        (logits [b, s, v/p] without labels, else losses [b, s] in nats; sentence-order logits [b, 2]).

    Communicates:
        over the tensor group: the transformer's; backward one all-reduce of [b, s, h] of the tied projection; with
        labels, forward three of [b, s].

    Source: sections 3 and 5.3; Devlin et al. 2018; sentence order from Lan et al. 2019 (ALBERT).
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.transformer = Transformer(config, context)
        self.pooler = ReplicatedLinear(config.hidden_size, config.hidden_size, context, config.initializer_std)
        self.lm_head = MaskedLanguageModelHead(config, context)
        self.order_head = ReplicatedLinear(config.hidden_size, 2, context, config.initializer_std)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        sample_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = self.transformer(tokens, token_types, attention_mask, sample_keys)
        order_logits = self.order_head(self.pooler(hidden[:, 0]).tanh())
        scores = self.lm_head(hidden, self.transformer.word_embedding.weight)
        if labels is not None:
            scores = vocab_parallel_cross_entropy(scores, labels, self.context)
        return scores, order_logits
