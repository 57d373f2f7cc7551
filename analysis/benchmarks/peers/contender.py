"""Interface of a contender: a model, AdamW and one training step on a given batch.

All clip the gradient norm at 1 and run the full step: forward pass, backward pass, update. Ours and Hugging Face's
start from the same weights; a model file and megatron-core initialize their own. Peers with fp32 weights that compute
in bf16 use autocast, as their users would.
"""

from abc import ABC, abstractmethod

from torch import Tensor

Batch = dict[str, Tensor]
MAX_NORM = 1.0


class Contender(ABC):
    """A training loop that runs one step per call."""

    @abstractmethod
    def step(self, batch: Batch, number: int) -> float | Tensor:
        """Train on a batch; returns its mean loss before the update (BERT: masked words plus sentence order)."""
