"""GPT-2: the causal language model of section 5.2."""

import torch
from torch import Tensor, nn

from ..config import TransformerConfig
from ..parallel import ParallelContext, linear_cross_entropy, vocab_parallel_logits
from .attention import KeyValueCache
from .transformer import Transformer


class GPT(nn.Module):
    """Left-to-right language model with the output projection tied to the word embedding.

    Shapes:
        tokens int64 [b, s]; labels int64 [b, s] (the next token; -100 is not scored) or None; sample_keys int32 [b],
        needed in training with dropout. Returns logits [b, s, v/p] without labels, else the sum of the losses in nats.

    Communicates:
        over the tensor group: the transformer's; backward one all-reduce of [b, s, h] of the tied projection; with
        labels, forward three of [b, s], in pieces (`linear_cross_entropy`).

    Source: sections 2.2, 3 and 5.2; Radford et al. 2019.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.transformer = Transformer(config, context)
        self.compiles = False

    def compile_layers(self, cuda_graphs: bool = False) -> None:
        """Let torch.compile fuse the layers, one graph for all, and the passes over the logits; names stay.

        Args:
            cuda_graphs: record the layers on a GPU and replay them.
        """
        self.compiles = True
        self.transformer.compile_layers(cuda_graphs)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, sample_keys: Tensor | None = None) -> Tensor:
        hidden = self.transformer(tokens, sample_keys=sample_keys)
        weight = self.transformer.word_embedding.weight
        if labels is None:
            return vocab_parallel_logits(hidden, weight, None, self.config.vocab_size, self.context)
        rows, vocab_size = hidden.flatten(0, 1), self.config.vocab_size
        return linear_cross_entropy(rows, weight, None, labels.flatten(), vocab_size, self.context, self.compiles)

    def next_token_logits(self, tokens: Tensor, counts: Tensor, cache: KeyValueCache) -> Tensor:
        """Scores of the token that follows each row, computed from its new tokens and the cache, which they join.

        Shapes:
            tokens int64 [b, s], each row's new ones first and then any ids; counts int64 [b], 1 to s, how many are
            new; returns [b, v/p].

        Communicates:
            the transformer's forward all-reduces over the tensor group, of [b, s, h].
        """
        hidden = self.transformer(tokens, cache=cache)
        cache.advance(counts)
        last = hidden[torch.arange(len(counts), device=hidden.device), counts - 1]  # [b, h]
        weight = self.transformer.word_embedding.weight
        return vocab_parallel_logits(last, weight, None, self.config.vocab_size, self.context)
