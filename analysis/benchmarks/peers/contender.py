"""Who runs: each a model, AdamW and one training step on a given batch.

All clip the gradient's norm at 1 and do the whole step: forward pass, backward pass, update. Ours and Hugging Face's
start from the same weights; a model file and megatron-core draw their own. Where a peer keeps fp32 weights and computes
in bf16, it does so by autocast, as its own users would.
"""

from abc import ABC, abstractmethod

from torch import Tensor

Batch = dict[str, Tensor]
MAX_NORM = 1.0


class Contender(ABC):
    """A training loop that is asked for one step at a time."""

    @abstractmethod
    def step(self, batch: Batch, number: int) -> float | Tensor:
        """Train on a batch; returns its mean loss (BERT: of masked words plus of order), before the update."""
