"""The Lightning modules: `Trainer(strategy=TensorParallelStrategy(...)).fit(GPTModule(config), data)`."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint, latest_checkpoint
from ..config import TransformerConfig
from ..config.family import family_of, load
from ..config.training import OptimizerConfig, PrecisionConfig, ScheduleConfig
from ..data.loading import check_entries, check_ids, cut_step, pinned_like, trim_padding
from ..kernels import PLAIN, Kernels
from ..models import build_model
from ..parallel.argmax import vocab_parallel_argmax
from ..parallel.data_collectives import sum_over_data_ranks
from ..parallel.pipeline import sum_over_stages
from .step.stock_trainer import dtype_of_trainer
from .step.training_module import MicroBatch, TrainingModule
from .teacher import TERM, Teacher

# The metrics by stage, as logs, records and checkpoints name them.
LOSS = {"train": "train/loss", "val": "val/loss", "test": "test/loss"}
PERPLEXITY = {"val": "val/perplexity", "test": "test/perplexity"}


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
        teacher: gives a training step its soft targets; validation has the labels alone.
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
        teacher: Teacher | None = None,
        logs: bool = True,
        **options: Any,
    ) -> None:
        schedule = schedule or ScheduleConfig("constant")
        optimizer = optimizer or OptimizerConfig(lr=1e-3)
        super().__init__(optimizer, schedule, precision, seed, compiles=kernels.compiles, **options)
        self.config, self.micro_batch_size, self.kernels, self.logs = config, micro_batch_size, kernels, logs
        self.teacher = teacher
        self._takes_trainers_precision = precision is None
        self.validation: dict[str, float] = {}

    @property
    def loss(self) -> Any:
        """The family's `loss.py`; a property, because a Python module cannot be copied or pickled."""
        return load(family_of(self.config.family).loss)

    @property
    def loss_terms(self) -> dict[str, str]:
        """Names of the loss terms in training, and of what each is a mean."""
        terms = self.loss.TERMS
        return terms if self.teacher is None else terms | {TERM: next(iter(terms.values()))}

    @property
    def _is_taught(self) -> bool:
        return self.teacher is not None and self.trainer.training

    def loss_counts(self, batch: MicroBatch) -> Tensor:
        """See `TrainingModule`."""
        counts = self.loss.loss_counts(batch)
        return torch.cat([counts, counts[:1]]) if self._is_taught else counts

    def loss_sums(self, batch: MicroBatch, sample_keys: Tensor | None) -> Tensor:
        """See `TrainingModule`."""
        if self._is_taught:
            batch = batch | {"targets": self.teacher.targets(batch)}
        return self.loss.loss_sums(self.model, batch, sample_keys)

    def total_loss(self, terms: Any) -> Any:
        """See `TrainingModule`."""
        return super().total_loss(terms) if self.teacher is None else self.teacher.mix(terms)

    def compute(self, micro_batch: MicroBatch, received: Tensor | None, sample_keys: Tensor | None) -> Tensor:
        """See `TrainingModule`."""
        if received is not None:
            micro_batch = micro_batch | {"tokens": received}
        if self.parallel.is_last_stage:
            return self.loss_sums(micro_batch, sample_keys)
        inputs = {name: micro_batch[name] for name in self.config.traits.transformer_inputs}
        return self.model.transformer(**inputs, sample_keys=sample_keys)

    def configure_model(self) -> None:
        """Take the Trainer's precision if no other is given, and build this rank's shard.

        Raises:
            ValueError: a setting of the Trainer that is not supported, or that the built model does not have.
        """
        if self._takes_trainers_precision:
            dtype = dtype_of_trainer(self.trainer)
            if self.model is not None and dtype != self.precision.dtype:
                raise ValueError(f"`precision` must stay {self.precision.dtype} for this module, but is {dtype}")
            self.precision = PrecisionConfig(dtype)
        super().configure_model()
        self._validation_sums: dict[int, Tensor] = {}
        for name in ("tp_size", "pp_size"):
            if (built_for := getattr(self.model.context, name)) != (size := getattr(self.parallel, name)):
                raise ValueError(f"`{name}` must stay {built_for} for this module, but is {size}")

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **options: Any) -> Self:
        """A module that starts with the weights of a checkpoint, written at any layout, or of a run's newest one.

        Args:
            options: of the constructor; `config` and those of `save_hyperparameters` are the checkpoint's, unless they
                are given.

        Raises:
            CheckpointError: it is missing or damaged.
            ValueError: an option of Lightning's (`check_load_options`).
        """
        checkpoint = Checkpoint.open(latest_checkpoint(checkpoint_path))
        checkpoint.check_intact()
        options = {"config": checkpoint.model_config()} | options
        return super().load_from_checkpoint(checkpoint.path, **options)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """The model's own `forward`: of GPT, the logits of this tensor rank.

        Raises:
            ValueError: the model is not built yet.
        """
        if self.model is None:
            raise ValueError(
                "the model must be built before it is called, which Trainer's fit, validate, test and predict do; "
                "`lmscale.models` has models without a Trainer, as `GPT(config)`"
            )
        return self.model(*args, **options)

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model of the family, with initial weights unless a checkpoint has them."""
        options = {"seed": None if self.weights_from else self.seed, "kernels": self.kernels}
        model = build_model(self.config, self.parallel, dtype=dtype, device=device, **options)
        if self.teacher is not None and not self.weights_from:
            self.teacher.initialize(model)
        return model

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> MicroBatch | list[MicroBatch]:
        """Prepare a batch, after the hook of this name that a subclass or a data module may have."""
        return self.prepare_batch(super()._on_before_batch_transfer(batch, dataloader_idx))

    def prepare_batch(self, batch: MicroBatch) -> MicroBatch | list[MicroBatch]:
        """Cut a step into its micro-batches, on the host: what their shapes depend on is then known without waiting
        for a GPU.

        Raises:
            ValueError: a user's loader gives another batch, or ids that the model does not have.
        """
        traits = self.config.traits
        inputs = traits.transformer_inputs or ("tokens",)
        check_entries(batch, inputs if self.trainer.predicting else (*inputs, *traits.loss_inputs))
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

    def training_step(self, batch: list[MicroBatch] | MicroBatch, batch_idx: int) -> Tensor:
        """See `TrainingModule`; sums also the losses to log, which would have to wait for the weights of ZeRO-1."""
        loss = super().training_step(batch, batch_idx)
        if self.logs:
            self._logged_terms = sum_over_data_ranks(self.step_terms.clone(), self.parallel)
        return loss

    def _finish_step(self, *args: Any) -> None:
        """Log the step as well, where callbacks see its loss in `on_train_batch_end`."""
        super()._finish_step()
        if self.logs:
            self.log("grad_norm", self.optimizer.counters.grad_norm)
            self.log_dict(self.named_losses("train", self._logged_terms), prog_bar=True)

    def predict_step(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The most probable token (GPT: the next one) at every position, int64 [b, s], equal on all tensor ranks.

        Raises:
            ValueError: the layout has several stages.
        """
        if self.parallel.pp_size > 1:
            raise ValueError(f"`pp_size` must be 1 for Trainer.predict, but is {self.parallel.pp_size}")
        logits = self.loss.token_logits(self.model, batch)
        return vocab_parallel_argmax(logits.flatten(0, 1), self.parallel).view_as(batch["tokens"])

    def validation_step(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one batch's summed losses and counts to those of its loader, in the last stage."""
        sums = self.forward_pass(batch, None)
        if self.parallel.is_last_stage:
            found = torch.stack([sums.double(), self.loss_counts(batch)])
            self._validation_sums[dataloader_idx] = self._validation_sums.get(dataloader_idx, 0) + found

    def on_validation_epoch_end(self) -> None:
        """Compute the losses over all validation sequences of each loader, each counted once."""
        self.validation = self._reduce_validation("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Compute the losses for `trainer.test`."""
        self._reduce_validation("test")

    def _reduce_validation(self, stage: str) -> dict[str, float]:
        num_loaders = len(getattr(self.trainer, f"num_{stage}_batches"))
        # A data rank without sequences takes part with zeros.
        zeros = torch.zeros(2, len(self.loss.TERMS), dtype=torch.float64, device=self.device)
        found = torch.stack([self._validation_sums.pop(index, zeros) for index in range(num_loaders)])
        metrics = {}
        for index, (sums, counts) in enumerate(
            sum_over_data_ranks(sum_over_stages(found, self.parallel), self.parallel).tolist()
        ):
            means = [s / c if c else float("nan") for s, c in zip(sums, counts, strict=True)]
            suffix = f"/dataloader_idx_{index}" if num_loaders > 1 else ""  # as Lightning names them
            metrics |= {name + suffix: value for name, value in self._metrics(stage, means).items()}
        if self.logs:
            self.log_dict(metrics, prog_bar=stage == "val", sync_dist=True, add_dataloader_idx=False)
        return metrics

    def _metrics(self, stage: str, means: list[float]) -> dict[str, float]:
        perplexity = torch.tensor(means[0], dtype=torch.float64).exp().item()  # inf, while math.exp would raise
        loss, *terms = self.named_losses(stage, means).items()
        return dict([loss, (PERPLEXITY[stage], perplexity), *terms])

    @property
    def validation_metrics(self) -> list[str]:
        """Names of the metrics that a validation reports."""
        return list(self._metrics("val", [0.0] * len(self.loss.TERMS)))

    def named_losses(self, stage: str, losses: Any) -> dict[str, Any]:
        """The loss and, if it has several terms, each of them, by metric name."""
        # BERT: train/lm_loss, train/order_loss, val/lm_loss, val/order_loss and so on
        is_taught = self.teacher is not None and stage == "train"
        names, total = (self.loss_terms, self.teacher.mix) if is_taught else (self.loss.TERMS, sum)
        terms = {f"{stage}/{name}_loss": loss for name, loss in zip(names, losses, strict=True)}
        return {LOSS[stage]: total(losses)} | (terms if len(losses) > 1 else {})


class GPTModule(PretrainModule):
    """Next-token prediction (section 5.2): the loss of `models/gpt/loss.py`."""


class BERTModule(PretrainModule):
    """Masked tokens and sentence order (section 5.3): the loss of `models/bert/loss.py`."""
