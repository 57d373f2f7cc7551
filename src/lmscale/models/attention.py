"""Multi-head self-attention with the heads split over the tensor ranks, and the cache that generation keeps of it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import Recompute, TransformerConfig
from ..parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear, counter_keep_mask


class KeyValueCache:
    """Keys and values of the tokens that each row of a batch has been given, so that a new token costs one position.

    Rows grow on their own: the slot of a token is its position, so rows of different lengths need no padding in front,
    and what a shorter row was filled up with is hidden from its queries until real tokens take its slots.

    Shapes:
        keys, values: one [b, n/p, capacity, d] a layer, zero where nothing was written (what is masked is still
        multiplied by zero, and must be finite); lengths int64 [b].

    Args:
        num_rows: sequences of the batch (b).
        capacity: positions there is room for.

    Raises:
        ValueError: more positions than the model has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        context: ParallelContext,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity > config.max_position_embeddings:
            raise ValueError(
                f"`capacity` must be at most `max_position_embeddings` ({config.max_position_embeddings}), "
                f"but is {capacity}"
            )
        self.capacity = capacity
        shape = (num_rows, context.shard(config.num_attention_heads), capacity, config.head_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = self.mask = torch.empty(0)

    def reserve(self, num_tokens: int) -> Tensor:
        """Positions of the next `num_tokens` of each row, int64 [b, num_tokens]; the mask of their queries is kept.

        Raises:
            ValueError: the longest row has no room for them.
        """
        stop = int(self.lengths.max()) + num_tokens
        if stop > self.capacity:
            raise ValueError(f"a row must be at most `capacity` ({self.capacity}) tokens long, but would be {stop}")
        self.positions = self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)
        slots = torch.arange(stop, device=self.lengths.device)
        self.mask = (slots <= self.positions[:, :, None]).unsqueeze(1)  # [b, 1, s, stop]: a query sees up to itself
        return self.positions

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put away a layer's new keys and values at the reserved positions and give all of it back.

        Shapes:
            k, v [b, n/p, s, d]; returns two [b, n/p, stop, d], `stop` slots as in `mask`.
        """
        rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        stop = self.mask.shape[-1]
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[rows, :, self.positions] = new.transpose(1, 2)
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def advance(self, counts: Tensor) -> None:
        """Count the first `counts` [b] of the reserved positions as tokens; the others were filling."""
        self.lengths = self.lengths + counts

    def select(self, rows: Tensor) -> None:
        """Keep these rows (int64, by number), in this order; a number that comes twice makes two rows of one."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.lengths = self.lengths.index_select(0, rows)


class SelfAttention(nn.Module):
    """Self-attention: QKV cut by columns so that a rank holds whole heads, output projection cut by rows.

    The fused QKV weight has rows in the order [head, (q, k, v), d]; a contiguous cut is then whole heads.

    Shapes:
        x [b, s, h], with sequence parallelism [b, s/p, h]; attention_mask bool [b, 1, 1, s], True where a key may be
        seen, or None; dropout_keys int32 [b] or None; returns the shape of x, before dropout. With a cache the s tokens
        go on its rows.

    Communicates:
        forward one all-reduce of [b, s, h] (g of the projection), backward one (f of QKV), over the tensor group; with
        sequence parallelism see `sequence_parallel_column_linear`.

    Source: section 3, Figure 3 b.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = layer
        self.num_local_heads = context.shard(config.num_attention_heads)
        self.first_head = context.tp_rank * self.num_local_heads
        self.head_size = config.head_size
        self.causal = config.architecture == "gpt"
        self.exact = config.attention == "exact"
        self.dropout = config.attention_dropout
        self.recompute_core = config.recompute is Recompute.SELECTIVE
        residual_std = config.initializer_std
        if config.scale_residual_init:
            residual_std /= math.sqrt(2 * config.num_layers)
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, context, config.initializer_std)
        self.output = RowParallelLinear(hidden, hidden, context, residual_std)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        dropout_keys: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.num_local_heads, 3, self.head_size))  # [b, s, n/p, 3, d]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [b, n/p, s, d]
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
            attention_mask = cache.mask  # causal too: by position
        core = self._exact_core if self.exact else self._sdpa_core
        # A GPU's fused core keeps no scores, so there is nothing to gain; and compiled, a recomputed core would draw
        # its dropout from a clone of the generator that our seeding does not reach.
        is_fused = q.is_cuda and not self.exact
        if self.recompute_core and self.training and not is_fused:
            context_vectors = checkpoint(core, q, k, v, attention_mask, dropout_keys, use_reentrant=False)
        else:
            context_vectors = core(q, k, v, attention_mask, dropout_keys)  # [b, n/p, s, d]
        return self.output(context_vectors.transpose(1, 2).flatten(2))

    def _sdpa_core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_keys: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        causal = self.causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)

    def _exact_core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_keys: Tensor | None) -> Tensor:
        s = q.shape[-2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)  # [b, n/p, s, s]
        if self.causal and mask is None:
            mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        # Softmax in fp32 at least: fp16 scores overflow at 65,504.
        dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
        probabilities = scores.softmax(dim=-1, dtype=dtype).to(v.dtype)
        if self.training and self.dropout > 0.0:
            # Keyed by the head's number in the whole model, so that the mask does not depend on tp_size.
            rows = self.num_local_heads * s
            keep = counter_keep_mask(dropout_keys, rows, s, self.dropout, self.first_head * s)
            probabilities = torch.where(keep.view_as(probabilities), probabilities * (1.0 / (1.0 - self.dropout)), 0.0)
        return probabilities @ v
