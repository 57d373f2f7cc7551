"""The Lightning module of pretraining: a Lightning batch is a micro-batch; the optimizer updates after the last one."""

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
from ...parallel import padding_of, sample_dropout_keys, seed_rank_generator
from ...parallel.data_collectives import sum_over_data_ranks
from .optimizer import MixedPrecisionAdamW
from .schedule import UpdateSchedule
from .stock_trainer import check_trainer, dtype_of_trainer
from .validation import ValidatedModule

# Of weights and activations; with fp8 they are bf16, and matrix products are in float8 (`Kernels.float8`).
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = torch.bfloat16


def _ignore(activity: str) -> None:
    """The default `progress`."""


class PretrainModule(ValidatedModule):
    """Pretraining of one model on the loss of its family.

    Each loss term is its sum over all scored positions of the *global* batch divided by their number. The loader
    gives the counts of a step before its first forward pass (`step_counts`). Each micro-batch is divided by them before
    its backward pass, so that any division of the batch over ranks and micro-batches gives the same gradient. With a
    loader that does not give them, the loss is the mean of the micro-batches' means. A step that holds fewer
    micro-batches than `accumulate_grad_batches`, as at the end of an epoch, is the mean over those that it holds.

    Args:
        config: the model, with its vocabulary known.
        optimizer, schedule: AdamW; by default a constant rate of 1e-3.
        precision: type of the weights, and the loss scale; None for the Trainer's `precision`.
        seed: of the weights and the dropout.
        loss_reduction, dropout_seeds: see `RunConfig`.
        kernels: implementations that compute the layers.
        weights_from: a checkpoint whose weights the model starts with; None: they are drawn from the seed.
        progress: called with what is being read, for the watchdog.
        logs: log losses and gradient norm by `self.log`.

    Attributes:
        completed_steps: optimizer steps, including skipped ones.
        step_terms: this rank's part of the loss terms of the last step, fp64 [number of terms].

    Communicates:
        per step, over the data group: one all-reduce of the term counts; the gradients, starting within the last
        backward pass (an all-reduce by DDP, or in fp32 by the optimizer for half types; with `zero1` reduces to their
        owners, and broadcasts of the updated weights); if the step is logged, one all-reduce of the loss.
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
        self.precision, self._takes_trainers_precision = precision, precision is None
        self.loss_reduction, self.dropout_seeds = loss_reduction, dropout_seeds
        self.weights_from, self.progress = weights_from, progress
        self.completed_steps, self._micro_step = 0, 0

    @property
    def optimizer(self) -> MixedPrecisionAdamW:
        """The Trainer's only optimizer."""
        return self.trainer.optimizers[0]

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the optimizer updates after the current micro-batch."""
        return not self.trainer.fit_loop._should_accumulate()

    def setup(self, stage: str) -> None:
        """Take the Trainer's precision if no other is given; raises `ValueError` if it is not supported."""
        if self._takes_trainers_precision:
            dtype = dtype_of_trainer(self.trainer)
            if self.model is not None and dtype != self.precision.dtype:
                raise ValueError(f"`precision` must stay {self.precision.dtype} for this module, but is {dtype}")
            self.precision = PrecisionConfig(dtype)

    def configure_model(self) -> None:
        """Build this rank's shard on its device; the strategy has created the groups.

        Lightning calls it after `setup`, and callbacks that average weights call it before.

        Raises:
            ValueError: a setting of the Trainer that is not supported (`check_trainer`).
        """
        check_trainer(self.trainer)
        if self.model is not None:
            if (built_for := self.model.context.tp_size) != self.parallel.tp_size:
                raise ValueError(f"`tp_size` must stay {built_for} for this module, but is {self.parallel.tp_size}")
            return
        device, dtype = self.trainer.strategy.root_device, DTYPES[self.precision.dtype]
        options = {"seed": None if self.weights_from else self.seed, "kernels": self.kernels}
        self.model = build_model(self.config, self.parallel, dtype=dtype, device=device, **options)
        if self.weights_from:
            self.read_weights(self.weights_from)

    def read_weights(self, path: str) -> None:
        """Read this rank's shard from a checkpoint of any layout."""
        with CheckpointReader(path, padding_of(self.model)) as reader:
            for name, param in self.model.named_parameters():
                self.progress(f"reading {name}")
                reader.read_into(f"model/{name}", param.detach(), self.parallel.tp_rank)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW over the shard, with fp32 masters from the checkpoint if there is one, and its schedule."""
        optimizer = MixedPrecisionAdamW(
            self.model.named_parameters(), self.optimizer_config, self.precision, self.parallel, self.kernels.compiles
        )
        if self.weights_from:
            with CheckpointReader(self.weights_from, padding_of(self.model)) as reader:
                optimizer.load_masters(lambda key, out: reader.read_into(key, out, self.parallel.tp_rank))
        schedule = UpdateSchedule(optimizer, self.schedule, self.optimizer_config.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the number of completed steps."""
        self.completed_steps = checkpoint["global_step"]

    def on_train_epoch_start(self) -> None:
        """Begin with a new step, also after one that was ended before its update."""
        self._micro_step = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the forward pass of one micro-batch; returns its part of the step's loss (the parts add up to it)."""
        if self._micro_step == 0:
            self._start_step(batch)
        step, tp_rank = self.completed_steps + 1, self.parallel.tp_rank  # the step in progress, counted from 1
        seed_rank_generator(self.seed, step, self._micro_step, self._dropout_rank, tp_rank)
        self._micro_step += 1
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
        """Divisors of a micro-batch's loss sums, such that the parts add up to the reported loss."""
        if self._step_counts is not None:
            return self._step_counts.clamp(min=1)
        parts = self.trainer.accumulate_grad_batches * self.parallel.dp_size
        return self.loss_counts(batch).clamp(min=1) * parts

    @property
    def _dropout_rank(self) -> int:
        """The data rank whose dropout seeds this rank uses: its own, or with shared seeds rank 0."""
        return 0 if self.dropout_seeds == "shared" else self.parallel.dp_rank

    def dropout_keys(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One dropout key per sample; with shared seeds, that of the sample at the same place on data rank 0."""
        num_samples = len(batch["tokens"])
        if "sample_numbers" in batch:
            samples_per_step = num_samples * self.trainer.accumulate_grad_batches
            numbers = batch["sample_numbers"] - (self.parallel.dp_rank - self._dropout_rank) * samples_per_step
        else:  # a user-supplied loader: numbers that no other micro-batch has, of whatever size they are
            micro_batch = self.trainer.fit_loop.epoch_loop.total_batch_idx * self.parallel.dp_size + self._dropout_rank
            numbers = torch.arange(num_samples, device=self.device) + (micro_batch << 31)
        return sample_dropout_keys(self.seed, numbers)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss for fp16, and undo two divisions: Lightning's by the micro-batches of a step, and DDP's by the
        data ranks. Here the parts of a step's loss are added, not averaged."""
        is_averaged = isinstance(self.trainer.strategy.model, DistributedDataParallel)
        factor = self.trainer.accumulate_grad_batches * (self.parallel.dp_size if is_averaged else 1)
        (loss * (self.optimizer.counters.loss_scale * factor)).backward(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        """Run the last micro-batch, add the gradients of the ranks, update; callbacks then see complete gradients."""

        def forward_backward_reduce() -> Any:
            loss = optimizer_closure()
            self.optimizer.reduce_gradients()
            self._correct_short_step()
            self.optimizer.counters.read()  # of the last step, which has long ended on the device
            self.lr_schedulers().step()
            return loss

        optimizer.step(closure=forward_backward_reduce)
        self.completed_steps, self._micro_step = self.completed_steps + 1, 0

    def _correct_short_step(self) -> None:
        """Divide by the micro-batches of this step, if they are fewer than `accumulate_grad_batches`.

        Without `step_counts` the divisor of every micro-batch has been the full number: only the last one shows that
        it is the last.
        """
        full = self.trainer.accumulate_grad_batches
        if self._step_counts is None and self._micro_step < full:
            factor = full / self._micro_step
            for gradient in self.optimizer.gradients().values():
                gradient.mul_(factor)
            self.step_terms *= factor

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Leave clipping by the global norm to the optimizer; the Trainer's `gradient_clip_val` sets its limit."""
        if gradient_clip_val is not None:
            self.optimizer.max_grad_norm = gradient_clip_val or None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the losses of the completed step."""
        if self.logs and self.is_last_micro_batch:
            losses = sum_over_data_ranks(self.step_terms.clone(), self.parallel).tolist()
            self.log("grad_norm", self.optimizer.counters.read().grad_norm)
            self.log_dict(self.named_losses("train", losses), prog_bar=True)
