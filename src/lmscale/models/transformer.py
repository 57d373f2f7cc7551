"""Embeddings and the stack of layers, shared by BERT and GPT."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import TransformerConfig
from ..parallel import (
    LayerNorm,
    ParallelContext,
    VocabParallelEmbedding,
    counter_dropout,
    describe_parameters,
    embedding_lookup,
    gather_sequence,
    keys_of_own_tokens,
    parameter,
    positions_of_own_tokens,
    sequence_shard,
    site_keys,
)
from .compiler_options import compiler_options
from .key_value_cache import KeyValueCache
from .layer import DROPOUTS_OF_A_LAYER, TransformerLayer


class Transformer(nn.Module):
    """Token ids to hidden states.

    pre:  dropout(embeddings) -> layers -> LayerNorm
    post: dropout(LayerNorm(embeddings)) -> layers, as in the original BERT; no LayerNorm follows the stack, each layer
          ends with one.

    Position and token-type embeddings are replicated. A stage of a pipeline has its own layers, under their numbers in
    the whole model; only the first has the embeddings, and only the last the LayerNorm that follows the stack, and a
    copy of the word embedding for the output projection.

    Shapes:
        tokens int64 [b, s], or after the first stage what the stage before returned; token_types int64 [b, s] or None
        (GPT); attention_mask bool or 0 and 1 [b, s], true for real tokens, or None; sample_keys int32 [b] or None: in
        training with dropout one process then draws them from torch's default generator; returns [b, s, h], before the
        last stage with sequence parallelism [b, s/p, h]. With a cache (generation) the s tokens are appended to its
        rows, each at its own position; the caller then reports how many are tokens (`KeyValueCache.advance`).

    Communicates:
        over the tensor group, forward one all-reduce of [b, s, h] for the embedding and two per layer; backward two per
        layer; full recompute repeats a layer's forward ones. With sequence parallelism all-gathers and reduce-scatters
        in their place, with `batch_halves` twice as many of half the size (both: `TransformerLayer`); with sequence
        parallelism forward one all-gather at the end.

    Raises:
        ValueError: a sequence longer than `max_position_embeddings` or the cache, or with sequence
            parallelism not a multiple of `tp_size`; an attention mask of floats; training with dropout on several
            tensor ranks and no `sample_keys`.

    Source: sections 2.2 and 3; Figure 7.
    """

    extra_repr = describe_parameters

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        config.check_tensor_parallel(context.tp_size, context.pad_heads)
        std, hidden = config.initializer_std, config.hidden_size
        self.config, self.context, self.uses_cuda_graphs = config, context, False
        self.placement = config.placement  # torch.compile cannot trace how the config finds it
        family = config.traits
        self.is_causal = family.is_causal
        if context.is_first_stage or context.is_last_stage:
            rows = config.vocab_size, config.padded_vocab_size
            self.word_embedding = VocabParallelEmbedding(*rows, hidden, context, std)
            if context.pp_size > 1:
                weight, tie = self.word_embedding.weight, "owner" if context.is_first_stage else "copy"
                weight.shard = dataclasses.replace(weight.shard, tie=tie)
        if context.is_first_stage:
            table = {"init": "normal", "std": std, "grad_is_partial": context.sequence_parallel, "role": "embedding"}
            self.position_embedding = parameter(context, (config.max_position_embeddings, hidden), **table)
            if family.num_token_types:
                self.token_type_embedding = parameter(context, (family.num_token_types, hidden), **table)
            if self.placement.after_embedding:
                self.embedding_norm = LayerNorm(hidden, config.norm_eps, context)
        self.own_layers = config.stages(context.pp_size)[context.pp_rank]
        others = nn.Identity()  # keeps the numbers of the layers
        self.layers = nn.ModuleList(
            TransformerLayer(config, context, i) if i in self.own_layers else others for i in range(config.num_layers)
        )
        if self.placement.after_stack and context.is_last_stage:
            self.final_norm = LayerNorm(hidden, config.norm_eps, context)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sample_keys: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        config = self.config
        drops = self.training and max(config.hidden_dropout, config.attention_dropout, config.input_dropout) > 0
        if drops and sample_keys is None:
            sample_keys = self._draw_sample_keys(tokens)
        if self.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if attention_mask is not None:
            attention_mask = self._visible(attention_mask)
        positions = None if cache is None else cache.reserve(tokens.shape[1])
        starts = self.context.is_first_stage
        embedding_key, layer_keys = None, [None] * config.num_layers
        if drops:
            keys = site_keys(sample_keys, 1 + DROPOUTS_OF_A_LAYER * config.num_layers)
            in_region = slice(1, None, DROPOUTS_OF_A_LAYER)  # the sites of attention probabilities
            length = tokens.shape[1] * (1 if starts or not self.context.sequence_parallel else self.context.tp_size)
            keys = keys_of_own_tokens(keys, length, in_region, self.context)
            embedding_key, layer_keys = keys[0], keys[1:].unflatten(0, (-1, DROPOUTS_OF_A_LAYER))
        self.before_layer(self.layers[self.own_layers[0]])
        x = self.embed(tokens, token_types, embedding_key, positions) if starts else tokens
        for index in self.own_layers:
            layer, keys = self.layers[index], layer_keys[index]
            self.before_layer(layer)
            if config.recompute == "full" and self.training:
                x = checkpoint(layer, x, attention_mask, keys, use_reentrant=False)
            else:
                x = layer(x, attention_mask, keys, cache)
        self.before_layer(None)
        if not self.context.is_last_stage:
            return x
        if self.placement.after_stack:
            x = self.final_norm(x)
        return gather_sequence(x, self.context)

    def before_layer(self, layer: nn.Module | None) -> None:
        """Called before the forward pass reads the weights of a layer, and of all before it in the model's order; None:
        before it reads any other weight.

        It does nothing unless `MixedPrecisionAdamW.gather_behind` has replaced it. A hook of the layer would be part of
        its compiled graph.
        """

    def _draw_sample_keys(self, tokens: Tensor) -> Tensor:
        if self.context.tp_size > 1:
            raise ValueError("`sample_keys` must be given in training with dropout: all tensor ranks need the same")
        return torch.randint(2**31 - 1, (len(tokens),), dtype=torch.int32, device=tokens.device)

    def _visible(self, attention_mask: Tensor) -> Tensor:
        """Which keys a query attends to, bool [b, 1, 1, s], or in a causal model [b, 1, s, s]."""
        if attention_mask.is_floating_point():
            raise ValueError(
                f"`attention_mask` must be of bool or of the integers 0 and 1, but is of {attention_mask.dtype}"
            )
        visible = attention_mask.bool()[:, None, None, :]  # over heads and queries
        if not self.is_causal:
            return visible
        s = attention_mask.shape[1]
        before = torch.ones(s, s, dtype=torch.bool, device=visible.device).tril()
        # Padding attends to itself, so that no row is empty (nan).
        return visible & before | torch.eye(s, dtype=torch.bool, device=visible.device)

    def embed(
        self,
        tokens: Tensor,
        token_types: Tensor | None,
        dropout_keys: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Sum of word, position and (BERT) token-type embeddings, with the placement's LayerNorm and dropout.

        Shapes:
            as in `forward`; positions int64 [b, s], or None for 0 to s - 1; returns [b, s, h], with sequence
            parallelism [b, s/p, h].

        Communicates:
            one all-reduce of [b, s, h] over the tensor group, forward only; with sequence parallelism a reduce-scatter,
            and backward an all-gather.
        """
        s = tokens.shape[1]
        if s > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence must be at most `max_position_embeddings` ({self.config.max_position_embeddings}) "
                f"tokens long, but is {s}"
            )
        words, types = self.word_embedding(tokens), None
        if token_types is not None:
            types = embedding_lookup(sequence_shard(token_types, self.context), self.token_type_embedding)
        return self._combine(words, types, dropout_keys, positions)

    def _combine(
        self, words: Tensor, token_types: Tensor | None, dropout_keys: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """What follows the lookups of `embed`, compiled with the layers; both tensors [b, s, h] or [b, s/p, h]."""
        table = self.position_embedding
        x = words + (positions_of_own_tokens(table, words, self.context) if positions is None else table[positions])
        if token_types is not None:
            x = x + token_types
        if self.placement.after_embedding:
            x = self.embedding_norm(x)
        if self.training and self.config.input_dropout > 0.0:
            x = counter_dropout(x, self.config.input_dropout, dropout_keys)
        return x

    def compile_layers(self, cuda_graphs: bool = False) -> None:
        """Compile every layer in place (one graph serves all; parameter names do not change), and what follows the
        lookups of the embeddings.

        Args:
            cuda_graphs: record the layers on a GPU, each with its own weights, and replay them. The host then makes one
                launch per layer, which speeds up small models. The next forward pass overwrites the results of a
                replay, so gradients must have been moved by then.
        """
        self.uses_cuda_graphs = cuda_graphs
        options = compiler_options(self.context, next(self.parameters()).device.type == "cuda", cuda_graphs)
        self._combine = torch.compile(self._combine, dynamic=False, options=options)
        for index in self.own_layers:
            self.layers[index].compile(dynamic=False, options=options)
