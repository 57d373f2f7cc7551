"""Multi-head self-attention with the heads split over the tensor ranks."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import TransformerConfig
from ..parallel import (
    ColumnParallelLinear,
    HeadNorm,
    ParallelContext,
    RowParallelLinear,
    counter_keep_mask,
    keys_from_row,
)
from .key_value_cache import KeyValueCache


class SelfAttention(nn.Module):
    """Self-attention: QKV cut by columns so that each rank holds whole heads, output projection cut by rows.

    The fused QKV weight has rows in the order [head, (q, k, v), d]; a contiguous cut is then whole heads.

    Every rank computes equally many heads, n/p rounded up (`context.pad_heads`). The last ones of the last ranks may be
    dummies. Their weights are zero and receive zero gradients, so they stay zero.

    Shapes:
        x [b, s, h], with sequence parallelism [b, s/p, h]; attention_mask bool [b, 1, 1 or s, s], True where a query
        attends to a key, or None: all keys, or in a causal model those up to its own position; dropout_keys int32 [b]
        or None; returns the shape of x, before dropout. With a cache the s tokens are appended to its rows.

    Communicates:
        forward one all-reduce of [b, s, h] (g of the projection), backward one (f of QKV), over the tensor group; with
        sequence parallelism see `sequence_parallel_column_linear`.

    Source: section 3, Figure 3 b.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = layer
        self.num_local_heads = context.shard(config.padded_heads(context.tp_size))
        self.first_head = context.tp_rank * self.num_local_heads
        self.head_size = config.head_size
        self.causal = config.traits.is_causal
        self.exact = config.attention == "exact"
        self.dropout = config.attention_dropout
        factor = config.scaling.attention_factor
        self.score_factor = None if factor == 1.0 else factor / math.sqrt(self.head_size)  # None: 1 / sqrt(d)
        self.rows_per_head: int | None = None  # by which the dropout mask counts the heads' rows; None: tokens
        self.recompute_core = config.recompute == "selective"
        padding = config.padded_width(context.tp_size) - hidden
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, context, config.initializer_std, 3 * padding)
        gains = (2 * self.head_size, 1.0), (self.head_size, config.placement.value_gain(config))  # Q and K; V
        self.qkv.weight.shard = replace(self.qkv.weight.shard, row_gains=gains)
        self.output = RowParallelLinear(hidden, hidden, context, config.placement.residual_std(config), padding)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(self.head_size, config.norm_eps, context) for _ in "qk")

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        dropout_keys: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q, k, v = self.split_heads(self.qkv(x))
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
            attention_mask = cache.mask  # also causal, by position
        core = self._exact_core if self.exact else self._sdpa_core
        # A GPU's fused core keeps no scores, so recomputing it saves nothing. Compiled, it would also draw its dropout
        # from a clone of the generator that our seeding does not reach.
        is_fused = q.is_cuda and not self.exact
        if self.recompute_core and self.training and not is_fused:
            context_vectors = checkpoint(core, q, k, v, attention_mask, dropout_keys, use_reentrant=False)
        else:
            context_vectors = core(q, k, v, attention_mask, dropout_keys)  # [b, n/p, s, d]
        return self.output(context_vectors.transpose(1, 2).flatten(2))

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalized with `qk_norm`, and values, each [b, n/p, s, d]."""
        qkv = qkv.unflatten(-1, (self.num_local_heads, 3, self.head_size))  # [b, s, n/p, 3, d]
        q, k, v = qkv.unbind(-2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scaled scores before the mask, [..., s, s]."""
        scores = q @ k.transpose(-1, -2)
        return scores / math.sqrt(self.head_size) if self.score_factor is None else scores * self.score_factor

    def _sdpa_core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_keys: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        causal = self.causal and mask is None
        options = {"dropout_p": dropout, "is_causal": causal, "scale": self.score_factor}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    def _exact_core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_keys: Tensor | None) -> Tensor:
        s = q.shape[-2]
        scores = self.scores(q, k)  # [b, n/p, s, s]
        if self.causal and mask is None:
            mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        # Softmax in fp32 at least: fp16 scores overflow at 65,504.
        dtype = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.softmax(dim=-1, dtype=dtype).to(v.dtype)
        if self.training and self.dropout > 0.0:
            # By the head's number in the whole model, so that the mask does not depend on tp_size.
            heads = torch.arange(self.num_local_heads, dtype=torch.int32, device=q.device) + self.first_head
            keys = keys_from_row(dropout_keys.unsqueeze(-1), heads * (self.rows_per_head or s))  # [b, n/p]
            keep = counter_keep_mask(keys.flatten(), s, s, self.dropout).view_as(probabilities)
            probabilities = torch.where(keep, probabilities * (1.0 / (1.0 - self.dropout)), 0.0)
        return probabilities @ v
