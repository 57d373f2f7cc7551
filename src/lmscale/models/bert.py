"""BERT with masked-LM and sentence-order heads: the bidirectional model of section 5.3."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from ..parallel import (
    IGNORE_LABEL,
    LayerNorm,
    ParallelContext,
    ReplicatedLinear,
    linear_cross_entropy,
    parameter,
    vocab_parallel_logits,
)
from .transformer import Transformer


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm (replicated), then the tied projection with a bias cut over the vocabulary.

    Shapes:
        hidden [..., h]; word_embedding [v/p, h]; returns logits [..., v/p].

    Communicates:
        backward one all-reduce of [..., h] over the tensor group (f of the projection).

    Source: Devlin et al. 2018; section 3 for the cut.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size, context, config.initializer_std)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, context, grad_is_partial=False)
        self.bias = parameter(context, (config.padded_vocab_size,), shard_dim=0)

    def forward(self, hidden: Tensor, word_embedding: Tensor) -> Tensor:
        hidden = self.transform(hidden)
        return vocab_parallel_logits(hidden, word_embedding, self.bias, self.config.vocab_size, self.context)

    def transform(self, hidden: Tensor) -> Tensor:
        """What is projected on the word embedding, [..., h] to [..., h]."""
        approximation = "tanh" if self.config.gelu_form == "tanh" else "none"
        return self.norm(F.gelu(self.dense(hidden), approximate=approximation))

    def sum_losses(self, rows: Tensor, word_embedding: Tensor, labels: Tensor, compiles: bool) -> Tensor:
        """Sum of the losses in nats; rows [n, h], labels int64 [n]; communicates as `linear_cross_entropy` does."""
        rows, vocab_size = self.transform(rows), self.config.vocab_size
        return linear_cross_entropy(rows, word_embedding, self.bias, labels, vocab_size, self.context, compiles)


class BERT(nn.Module):
    """Bidirectional encoder with pooler, masked-LM head and sentence-order head.

    With labels the masked-LM head works on the scored positions alone, 15 % of them.

    Shapes:
        tokens, token_types int64 [b, s]; attention_mask bool [b, s], True for real tokens, or None; labels int64
        [b, s] with -100 where not masked, or None; sample_keys int32 [b], needed in training with dropout; scored int64
        [m], where the labels of the flattened batch are not -100, or None: they are looked for, which makes the host
        wait for a GPU. Returns (logits [b, s, v/p] without labels, else the sum of the losses in nats; sentence-order
        logits [b, 2]).

    Communicates:
        over the tensor group: the transformer's; backward one all-reduce of the tied projection, of [b, s, h], with
        labels of [m, h]; with labels, forward three of [m], in pieces (`linear_cross_entropy`).

    Source: sections 3 and 5.3; Devlin et al. 2018; sentence order from Lan et al. 2019 (ALBERT).
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.transformer = Transformer(config, context)
        self.pooler = ReplicatedLinear(config.hidden_size, config.hidden_size, context, config.initializer_std)
        self.lm_head = MaskedLanguageModelHead(config, context)
        self.order_head = ReplicatedLinear(config.hidden_size, 2, context, config.initializer_std)
        self.compiles = False

    def compile_layers(self, cuda_graphs: bool = False) -> None:
        """Let torch.compile fuse the layers, one graph for all, and the passes over the logits; names stay.

        Args:
            cuda_graphs: record the layers on a GPU and replay them.
        """
        self.compiles = True
        self.transformer.compile_layers(cuda_graphs)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        sample_keys: Tensor | None = None,
        scored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = self.transformer(tokens, token_types, attention_mask, sample_keys)
        first = hidden[:, 0].contiguous()  # a view would keep all of `hidden` for the backward pass
        order_logits = self.order_head(self.pooler(first).tanh())
        weight = self.transformer.word_embedding.weight
        if labels is None:
            return self.lm_head(hidden, weight), order_logits
        if scored is None:
            scored = scored_positions(labels)
        rows = hidden.flatten(0, 1).index_select(0, scored)
        loss = self.lm_head.sum_losses(rows, weight, labels.flatten().index_select(0, scored), self.compiles)
        return loss, order_logits


def scored_positions(labels: Tensor) -> Tensor:
    """Where the labels of the flattened batch are not -100; labels int64 [b, s]; returns int64 [m]."""
    return (labels.flatten() != IGNORE_LABEL).nonzero().squeeze(1)
