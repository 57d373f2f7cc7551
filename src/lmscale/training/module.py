"""The Lightning modules: `Trainer(strategy=TensorParallelStrategy(...)).fit(GPTModule(config), data)`."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TransformerConfig
from ..config.family import family_of, load
from ..config.training import OptimizerConfig, PrecisionConfig, ScheduleConfig
from ..data.loading import check_ids, cut_step, pinned_like, trim_padding
from ..kernels import PLAIN, Kernels
from ..models import build_model
from ..parallel.argmax import vocab_parallel_argmax
from ..parallel.data_collectives import sum_over_data_ranks
from ..parallel.pipeline import sum_over_stages
from .step.stock_trainer import check_trainer, dtype_of_trainer
from .step.training_module import MicroBatch, TrainingModule

# Lightning says that it uses the hook of the module, not that of the data module, which has none.
warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer` in `LightningModule`")


class PretrainModule(TrainingModule):
    """Pretraining of one model on the loss of its family, and its mean over the validation sequences.

    A training batch of the loader is a dict with all sequences of this data rank's step.

    Args:
        config: the model, with its vocabulary known; its family's `loss.py` says what the loss terms are and what a
            micro-batch holds.
        optimizer, schedule: AdamW; by default a constant rate of 1e-3.
        precision: type of the weights, and the loss scale; None for the Trainer's `precision`.
        micro_batch_size: sequences of one forward pass in training; None: all of a batch.
        kernels: implementations that compute the layers.
        logs: log losses and gradient norm by `self.log`.
        options: of `TrainingModule`.

    Attributes:
        validation: the last validation's losses, exact.

    Communicates:
        as `TrainingModule`; if a step is logged, one all-reduce of the loss over the data group; per validation one of
        the sums and counts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        optimizer: OptimizerConfig | None = None,
        schedule: ScheduleConfig | None = None,
        *,
        precision: PrecisionConfig | None = None,
        seed: int = 1234,
        micro_batch_size: int | None = None,
        kernels: Kernels = PLAIN,
        logs: bool = True,
        **options: Any,
    ) -> None:
        schedule = schedule or ScheduleConfig("constant", warmup_steps=0, decay_steps=1)
        optimizer = optimizer or OptimizerConfig(lr=1e-3)
        super().__init__(optimizer, schedule, precision, seed, compiles=kernels.compiles, **options)
        self.config, self.micro_batch_size, self.kernels, self.logs = config, micro_batch_size, kernels, logs
        self._takes_trainers_precision = precision is None
        self.validation: dict[str, float] = {}

    @property
    def loss(self) -> Any:
        """The family's `loss.py`; a property, because a Python module cannot be copied or pickled."""
        return load(family_of(self.config.family).loss)

    @property
    def loss_terms(self) -> dict[str, str]:
        """Names of the loss terms, and of what each is a mean."""
        return self.loss.TERMS

    def loss_counts(self, batch: MicroBatch) -> Tensor:
        """See `TrainingModule`."""
        return self.loss.loss_counts(batch)

    def loss_sums(self, batch: MicroBatch, sample_keys: Tensor | None) -> Tensor:
        """See `TrainingModule`."""
        return self.loss.loss_sums(self.model, batch, sample_keys)

    def compute(self, micro_batch: MicroBatch, received: Tensor | None, sample_keys: Tensor | None) -> Tensor:
        """See `TrainingModule`."""
        if received is not None:
            micro_batch = micro_batch | {"tokens": received}
        if self.parallel.is_last_stage:
            return self.loss_sums(micro_batch, sample_keys)
        inputs = {name: micro_batch[name] for name in self.config.traits.transformer_inputs}
        return self.model.transformer(**inputs, sample_keys=sample_keys)

    def setup(self, stage: str) -> None:
        """Take the Trainer's precision if no other is given; raises `ValueError` if it is not supported."""
        if self._takes_trainers_precision:
            dtype = dtype_of_trainer(self.trainer)
            if self.model is not None and dtype != self.precision.dtype:
                raise ValueError(f"`precision` must stay {self.precision.dtype} for this module, but is {dtype}")
            self.precision = PrecisionConfig(dtype)

    def configure_model(self) -> None:
        """Build this rank's shard; Lightning calls it after `setup`, callbacks that average weights call it before.

        Raises:
            ValueError: a setting of the Trainer that is not supported (`check_trainer`).
        """
        check_trainer(self.trainer)
        super().configure_model()
        for name in ("tp_size", "pp_size"):
            if (built_for := getattr(self.model.context, name)) != (size := getattr(self.parallel, name)):
                raise ValueError(f"`{name}` must stay {built_for} for this module, but is {size}")

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model of the family, with initial weights unless a checkpoint has them."""
        options = {"seed": None if self.weights_from else self.seed, "kernels": self.kernels}
        return build_model(self.config, self.parallel, dtype=dtype, device=device, **options)

    def on_before_batch_transfer(self, batch: MicroBatch, dataloader_idx: int) -> MicroBatch | list[MicroBatch]:
        """Cut a step into its micro-batches, on the host: what their shapes depend on is then known without waiting
        for a GPU.

        Raises:
            ValueError: a user's loader gives ids that the model does not have.
        """
        if "sample_numbers" not in batch:  # our own data have been checked
            check_ids(batch, self.config.vocab_size)
        if not self.trainer.training:
            return trim_padding(batch)
        return cut_step(self._number_samples(batch), self.micro_batch_size)

    def _number_samples(self, batch: MicroBatch) -> MicroBatch:
        """Add `dropout_numbers`: numbers that no other sample of the run has; with shared seeds those of the samples
        at the same place on data rank 0."""
        numbers, context = batch.get("sample_numbers"), self.parallel
        samples_per_rank = len(batch["tokens"])
        if numbers is None:  # a user's loader, with batches of any size
            samples_per_rank = 1 << 31
            first = (self.completed_steps * context.dp_size + context.dp_rank) * samples_per_rank
            numbers = torch.arange(first, first + len(batch["tokens"]))
        numbers = numbers - (context.dp_rank - self.dropout_rank) * samples_per_rank
        return batch | {"dropout_numbers": pinned_like(numbers, batch["tokens"])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the losses of the completed step."""
        if self.logs:
            losses = sum_over_data_ranks(self.step_terms.clone(), self.parallel).tolist()
            self.log("grad_norm", self.optimizer.counters.read().grad_norm)
            self.log_dict(self.named_losses("train", losses), prog_bar=True)

    def predict_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The most probable token (GPT: the next one) at every position, int64 [b, s], equal on all tensor ranks.

        Raises:
            ValueError: the layout has several stages.
        """
        if self.parallel.pp_size > 1:
            raise ValueError(f"`pp_size` must be 1 for Trainer.predict, but is {self.parallel.pp_size}")
        logits = self.loss.token_logits(self.model, batch)
        return vocab_parallel_argmax(logits.flatten(0, 1), self.parallel).view_as(batch["tokens"])

    def on_validation_epoch_start(self) -> None:
        """Reset the sums; a data rank may have no sequences."""
        self._validation_sums = torch.zeros(2, len(self.loss_terms), dtype=torch.float64, device=self.device)

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        """Add one batch's summed losses and counts, in the last stage."""
        sums = self.forward_pass(batch, None)
        if self.parallel.is_last_stage:
            self._validation_sums += torch.stack([sums.double(), self.loss_counts(batch)])

    def on_validation_epoch_end(self) -> None:
        """Compute the losses over all validation sequences, each counted once."""
        self.validation = self._reduce_validation("val")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Compute the losses for `trainer.test`."""
        self._reduce_validation("test")

    def _reduce_validation(self, stage: str) -> dict[str, float]:
        found = sum_over_stages(self._validation_sums, self.parallel)
        sums, counts = sum_over_data_ranks(found, self.parallel).tolist()
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


class GPTModule(PretrainModule):
    """Next-token prediction (section 5.2): the loss of `models/gpt/loss.py`."""


class BERTModule(PretrainModule):
    """Masked tokens and sentence order (section 5.3): the loss of `models/bert/loss.py`."""
