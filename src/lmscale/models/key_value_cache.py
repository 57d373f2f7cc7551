"""Keys and values that generation keeps of the tokens it has seen."""

import torch
from torch import Tensor

from ..config import TransformerConfig
from ..config.checks import refuse
from ..parallel import ParallelContext


class KeyValueCache:
    """Keys and values of the tokens that each row of a batch has been given, so that a new token costs one position.

    Rows grow on their own: the slot of a token is its position, so rows of different lengths need no padding in front,
    and the padding of a shorter row is hidden from its queries until real tokens take its slots.

    Shapes:
        keys, values: one [b, n/p, capacity, d] per layer, zero where nothing was written (what is masked is still
        multiplied by zero, and must be finite); lengths int64 [b].

    Args:
        num_rows: sequences of the batch (b).
        capacity: number of positions per row.

    Raises:
        ValueError: more positions than the model has.
    """

    positions: Tensor  # both are set by `reserve`
    mask: Tensor

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
            refuse("capacity", f"at most `max_position_embeddings` ({config.max_position_embeddings})", capacity)
        self.capacity = capacity
        shape = (num_rows, context.shard(config.padded_heads(context.tp_size)), capacity, config.head_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def reserve(self, num_tokens: int) -> Tensor:
        """Positions of the next `num_tokens` of each row, int64 [b, num_tokens]; also sets `mask` for their queries.

        Raises:
            ValueError: the longest row would exceed `capacity`.
        """
        stop = int(self.lengths.max()) + num_tokens
        if stop > self.capacity:
            raise ValueError(f"a row must be at most `capacity` ({self.capacity}) tokens long, but would be {stop}")
        self.positions = self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)
        slots = torch.arange(stop, device=self.lengths.device)
        # [b, 1, s, stop]: a query attends up to its own position
        self.mask = (slots <= self.positions[:, :, None]).unsqueeze(1)
        return self.positions

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values at the reserved positions; return all keys and values of the layer.

        Shapes:
            k, v [b, n/p, s, d]; returns two [b, n/p, stop, d], `stop` slots as in `mask`.
        """
        rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        stop = self.mask.shape[-1]
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[rows, :, self.positions] = new.transpose(1, 2)
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def advance(self, counts: Tensor) -> None:
        """Count the first `counts` [b] of the reserved positions as tokens; the rest are padding."""
        self.lengths = self.lengths + counts

    def select(self, rows: Tensor) -> None:
        """Keep these rows (int64, by number), in this order; a number that comes twice makes two rows of one."""
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.lengths = self.lengths.index_select(0, rows)
