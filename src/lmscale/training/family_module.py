"""Pretraining with the loss of the model's family."""

from typing import Any

from torch import Tensor

from ..config import TransformerConfig
from ..config.family import family_of, load
from .step.module import PretrainModule


class FamilyModule(PretrainModule):
    """Loss terms, and what a micro-batch holds: as in the `loss.py` of the family; see `PretrainModule`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.loss = load(family_of(config.family).loss)
        self.loss_terms = self.loss.TERMS

    def count_terms(self, batch: dict[str, Tensor]) -> Tensor:
        """Scored positions of each loss term in a micro-batch, fp64 [number of terms]; needs no model."""
        return self.loss.count_terms(batch)

    def sum_terms(self, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
        """Summed loss of each term over a micro-batch in nats, [number of terms], from a forward pass."""
        return self.loss.sum_terms(self.model, batch, sample_keys)
