"""GPT-2: the causal language model of section 5.2."""

import torch
from torch import Tensor

from ...parallel import SoftTargets, linear_cross_entropy, vocab_parallel_logits
from ..key_value_cache import KeyValueCache
from ..language_model import LanguageModel
from ..parametrization import scaled


class GPT(LanguageModel):
    """Left-to-right language model with the output projection tied to the word embedding.

    Shapes:
        tokens int64 [b, s]; labels int64 [b, s] (the next token; -100 is not scored) or None; sample_keys int32 [b] of
        the dropout masks, or None where one process draws them; attention_mask bool or 0 and 1 [b, s], true for real
        tokens, or None. Returns logits [b, s, v/p] without labels, else what `linear_cross_entropy` does of all rows.

    Args:
        targets: of a teacher, for these rows.

    Communicates:
        over the tensor group: the transformer's; backward one all-reduce of [b, s, h] of the tied projection; with
        labels, forward three of [b, s], in chunks (`linear_cross_entropy`).

    Source: sections 2.2, 3 and 5.2; Radford et al. 2019.
    """

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        sample_keys: Tensor | None = None,
        attention_mask: Tensor | None = None,
        targets: SoftTargets | None = None,
    ) -> Tensor:
        hidden = self.transformer(tokens, attention_mask=attention_mask, sample_keys=sample_keys)
        if labels is None:
            return self.logits(hidden)
        rows = scaled(hidden.flatten(0, 1), self.config.scaling.output_factor)
        inputs = rows, self.transformer.word_embedding.weight, None, labels.flatten(), self.config.vocab_size
        return linear_cross_entropy(*inputs, self.context, self.compiles, targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every word, [..., h] to [..., v/p]."""
        weight = self.transformer.word_embedding.weight
        hidden = scaled(hidden, self.config.scaling.output_factor)
        return vocab_parallel_logits(hidden, weight, None, self.config.vocab_size, self.context)

    def next_token_logits(self, tokens: Tensor, counts: Tensor, cache: KeyValueCache) -> Tensor:
        """Scores of the token that follows each row, computed from its new tokens and the cache they are added to.

        Shapes:
            tokens int64 [b, s], each row's new ones first and then any ids; counts int64 [b], 1 to s, how many are
            new; returns [b, v/p].

        Communicates:
            the transformer's forward all-reduces of [b, s, h] over the tensor group.
        """
        hidden = self.transformer(tokens, cache=cache)
        cache.advance(counts)
        last = hidden[torch.arange(len(counts), device=hidden.device), counts - 1]  # [b, h]
        return self.logits(last)
