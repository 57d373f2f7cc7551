"""The Lightning module of pretraining: one of Lightning's batches is a micro-batch, and the update follows the last."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...checkpoint import CheckpointReader
from ...config import TransformerConfig
from ...config.training import OptimizerConfig, PrecisionConfig, ScheduleConfig
from ...kernels import PLAIN, Kernels
from ...models import build_model
from ...parallel import sample_dropout_keys, seed_rank_generator
from ...parallel.data_collectives import sum_over_data_ranks
from .optimizer import MixedPrecisionAdamW
from .schedule import UpdateSchedule
from .stock_trainer import check_trainer, dtype_of_trainer
from .validation import ValidatedModule

# Of weights and activations; fp8 is a way to multiply bf16 numbers (`Kernels.float8`).
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = torch.bfloat16


def _ignore(where: str) -> None:
    """Nobody wants to know where the work is."""


class PretrainModule(ValidatedModule):
    """Pretraining of one model on the loss of its family.

    The loss of a term is its sum over all scored positions of the *global* batch divided by their number. The loader
    knows a step's counts before its first forward pass (`step_counts`), so each micro-batch is divided by them before
    its backward pass, and any cut of the batch over ranks and micro-batches gives the same gradient. Batches of a
    loader that does not know them count as a mean of the micro-batches' means.

    Args:
        config: the model, with its vocabulary known.
        optimizer, schedule: AdamW; by default a constant rate of 1e-3.
        precision: type of the weights, and the loss scale; None takes the Trainer's `precision`.
        seed: of the weights and the dropout.
        loss_reduction, dropout_seeds: see `RunConfig`.
        kernels: what computes the layers.
        weights_from: a checkpoint whose weights the model starts with; None draws them from the seed.
        progress: is told which tensor is being read.
        logs: log losses and gradient norm by `self.log`.

    Attributes:
        completed_steps: updates, those that were skipped included.
        step_terms: this rank's part of the loss terms of the last step, fp64 [number of terms].

    Communicates:
        per step, over the data group: one all-reduce of the term counts; the gradients, from within the last backward
        pass on (an all-reduce by DDP, or of half types in fp32 by the optimizer; with `zero1` reduces to their owners,
        and broadcasts of the updated weights); where it is logged, one all-reduce of the reported loss.
    """

    def __init__(
        self,
        config: TransformerConfig,
        optimizer: OptimizerConfig | None = None,
        schedule: ScheduleConfig | None = None,
        *,
        precision: PrecisionConfig | None = None,
        seed: int = 1234,
        loss_reduction: str = "token_mean",
        dropout_seeds: str = "unique",
        kernels: Kernels = PLAIN,
        weights_from: str | None = None,
        progress: Callable[[str], None] = _ignore,
        logs: bool = True,
    ) -> None:
        super().__init__(config, logs)
        self.seed, self.kernels = seed, kernels
        self.optimizer_config = optimizer or OptimizerConfig(lr=1e-3)
        self.schedule = schedule or ScheduleConfig("constant", warmup_steps=0, decay_steps=1)
        self.precision = precision
        self.loss_reduction, self.dropout_seeds = loss_reduction, dropout_seeds
        self.weights_from, self.progress = weights_from, progress
        self.completed_steps = 0

    @property
    def optimizer(self) -> MixedPrecisionAdamW:
        """The Trainer's only one."""
        return self.trainer.optimizers[0]

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the step's update follows the current micro-batch."""
        return not self.trainer.fit_loop._should_accumulate()

    def setup(self, stage: str) -> None:
        """Refuse what the Trainer was asked for and cannot be."""
        check_trainer(self.trainer)
        if self.precision is None:
            self.precision = PrecisionConfig(dtype_of_trainer(self.trainer))

    def configure_model(self) -> None:
        """Build this rank's shard, on its device, once the groups exist."""
        if self.model is not None:
            built_for = self.model.context.tp_size
            if built_for != self.parallel.tp_size:
                raise ValueError(f"`tp_size` must stay {built_for} for this module, but is {self.parallel.tp_size}")
            return
        device, dtype = self.trainer.strategy.root_device, DTYPES[self.precision.dtype]
        seed = None if self.weights_from else self.seed
        self.model = build_model(
            self.config, self.parallel, seed=seed, dtype=dtype, device=device, kernels=self.kernels
        )
        if self.weights_from:
            self.read_weights(self.weights_from)

    def read_weights(self, path: str) -> None:
        """Take this rank's shard from a checkpoint, whatever its layout."""
        with CheckpointReader(path) as reader:
            for name, param in self.model.named_parameters():
                self.progress(f"reading {name}")
                reader.read_into(f"model/{name}", param.detach(), self.parallel.tp_rank)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW over the shard, its masters as exact as the weights' source, and its learning rate."""
        optimizer = MixedPrecisionAdamW(
            self.model.named_parameters(), self.optimizer_config, self.precision, self.parallel
        )
        if self.weights_from:
            with CheckpointReader(self.weights_from) as reader:
                optimizer.load_masters(lambda key, out: reader.read_into(key, out, self.parallel.tp_rank))
        schedule = UpdateSchedule(optimizer, self.schedule, self.optimizer_config.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the count."""
        self.completed_steps = checkpoint["global_step"]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Forward pass of one micro-batch; returns its part of the step's loss, which is the sum of the parts."""
        micro_step = batch_idx % self.trainer.accumulate_grad_batches
        if micro_step == 0:
            self._start_step(batch)
        context = self.parallel
        seed_rank_generator(self.seed, self.completed_steps + 1, micro_step, self._dropout_rank, context.tp_rank)
        if self.is_last_micro_batch:
            self.optimizer.start_grad_sync()
        sums = self.loss_sums(batch, self.dropout_keys(batch, batch_idx))
        terms = sums / self._denominators(batch).to(sums.dtype)
        self.step_terms += terms.detach().double()
        return terms.sum()

    def _start_step(self, batch: dict[str, Tensor]) -> None:
        counts = batch.get("step_counts")
        known = counts is not None and self.loss_reduction == "token_mean"
        self._step_counts = sum_over_data_ranks(counts.clone(), self.parallel) if known else None
        self.step_terms = torch.zeros(len(self.loss_terms), dtype=torch.float64, device=self.device)

    def _denominators(self, batch: dict[str, Tensor]) -> Tensor:
        """What a micro-batch's term sums are divided by, so that the parts add up to the reported loss."""
        if self._step_counts is not None:
            return self._step_counts.clamp(min=1)
        parts = self.trainer.accumulate_grad_batches * self.parallel.dp_size
        return self.loss_counts(batch).clamp(min=1) * parts

    @property
    def _dropout_rank(self) -> int:
        """The data rank whose dropout this one draws: its own, or with shared seeds the first."""
        return 0 if self.dropout_seeds == "shared" else self.parallel.dp_rank

    def dropout_keys(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """A key for each sample, or with shared seeds for the sample at the same place of the first data rank."""
        dp_rank, num_samples = self.parallel.dp_rank, len(batch["tokens"])
        if "sample_numbers" in batch:
            numbers = batch["sample_numbers"]
        else:  # a loader of the user's: any numbers that no other micro-batch has
            micro_batch = self.trainer.fit_loop.epoch_loop.total_batch_idx * self.parallel.dp_size + dp_rank
            numbers = torch.arange(num_samples, device=self.device) + micro_batch * num_samples
        share = num_samples * self.trainer.accumulate_grad_batches
        return sample_dropout_keys(self.seed, numbers - (dp_rank - self._dropout_rank) * share)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss for fp16, and undo two divisions: Lightning's by the micro-batches of a step, and DDP's of the
        gradients by the data ranks. Parts of a mean are added, not averaged."""
        is_averaged = isinstance(self.trainer.strategy.model, DistributedDataParallel)
        factor = self.trainer.accumulate_grad_batches * (self.parallel.dp_size if is_averaged else 1)
        (loss * (self.optimizer.loss_scale.value * factor)).backward(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        """The last micro-batch, the sum of the gradients over the ranks, the update: callbacks see whole gradients."""

        def forward_backward_reduce() -> Any:
            loss = optimizer_closure()
            self.optimizer.reduce_gradients()
            return loss

        optimizer.step(closure=forward_backward_reduce)
        self.completed_steps += 1

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """The optimizer clips by the norm of the whole model; a number of the Trainer's replaces its own."""
        if gradient_clip_val is not None:
            self.optimizer.max_grad_norm = gradient_clip_val or None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the step that has just ended."""
        if self.logs and self.is_last_micro_batch:
            losses = sum_over_data_ranks(self.step_terms.clone(), self.parallel).tolist()
            self.log("grad_norm", self.optimizer.grad_norm)
            self.log_dict(self.named_losses("train", losses), prog_bar=True)
