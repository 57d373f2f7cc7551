"""The loss of the model's family, and its mean over the validation sequences."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from ...config import TransformerConfig
from ...config.family import family_of, load
from ...parallel import ParallelContext
from ...parallel.argmax import vocab_parallel_argmax
from ...parallel.data_collectives import sum_over_data_ranks


class ValidatedModule(L.LightningModule):
    """The part of the module that `validate`, `test` and `predict` use: the model and the loss of its family.

    Args:
        config: the model; its family's `loss.py` says what the loss terms are and what a micro-batch holds.
        logs: log the losses by `self.log`.

    Attributes:
        validation: the last validation's losses, exact.

    Communicates:
        per validation one all-reduce of the sums and counts over the data group.
    """

    def __init__(self, config: TransformerConfig, logs: bool) -> None:
        super().__init__()
        self.config, self.logs = config, logs
        self.model: torch.nn.Module | None = None
        self.validation: dict[str, float] = {}

    @property
    def loss(self) -> Any:
        """The family's `loss.py`; a property, because a Python module cannot be copied or pickled."""
        return load(family_of(self.config.family).loss)

    @property
    def loss_terms(self) -> dict[str, str]:
        """Names of the loss terms, and of what each is a mean."""
        return self.loss.TERMS

    @property
    def parallel(self) -> ParallelContext:
        """This rank's place, from the strategy."""
        return self.trainer.strategy.parallel

    def loss_counts(self, batch: dict[str, Tensor]) -> Tensor:
        """Number of scored positions of each loss term in a micro-batch, fp64 [number of terms]; needs no model."""
        return self.loss.loss_counts(batch)

    def loss_sums(self, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
        """Summed loss of each term over a micro-batch in nats, [number of terms], from a forward pass."""
        return self.loss.loss_sums(self.model, batch, sample_keys)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most probable token (GPT: the next one) at every position, int64 [b, s], equal on all tensor ranks."""
        logits = self.loss.token_logits(self.model, batch)
        return vocab_parallel_argmax(logits.flatten(0, 1), self.parallel).view_as(batch["tokens"])

    def on_validation_epoch_start(self) -> None:
        """Reset the sums; a data rank may have no sequences."""
        self._validation_sums = torch.zeros(2, len(self.loss_terms), dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one micro-batch's summed losses and counts."""
        self._validation_sums += torch.stack([self.loss_sums(batch, None).double(), self.loss_counts(batch)])

    def on_validation_epoch_end(self) -> None:
        """Compute the losses over all validation sequences, each counted once."""
        self.validation = self._reduce_validation("val")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Compute the losses for `trainer.test`."""
        self._reduce_validation("test")

    def _reduce_validation(self, stage: str) -> dict[str, float]:
        sums, counts = sum_over_data_ranks(self._validation_sums, self.parallel).tolist()
        means = [s / c if c else float("nan") for s, c in zip(sums, counts, strict=True)]
        metrics = self._metrics(stage, means)
        if self.logs:
            self.log_dict(metrics, prog_bar=stage == "val", sync_dist=True)
        return metrics

    def _metrics(self, stage: str, means: list[float]) -> dict[str, float]:
        perplexity = torch.tensor(means[0], dtype=torch.float64).exp().item()  # inf, while math.exp would raise
        loss, *terms = self.named_losses(stage, means).items()
        return dict([loss, (f"{stage}/perplexity", perplexity), *terms])

    @property
    def validation_metrics(self) -> list[str]:
        """Names of the metrics that a validation reports."""
        return list(self._metrics("val", [0.0] * len(self.loss_terms)))

    def named_losses(self, stage: str, losses: list[float]) -> dict[str, float]:
        """The loss and, if it has several terms, each of them, by metric name."""
        terms = {f"{stage}/{name}_loss": loss for name, loss in zip(self.loss_terms, losses, strict=True)}
        return {f"{stage}/loss": sum(losses)} | (terms if len(losses) > 1 else {})
