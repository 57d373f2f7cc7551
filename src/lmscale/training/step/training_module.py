"""The training step, of pretraining and finetuning alike: one Lightning batch is one optimizer step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from ...checkpoint import Checkpoint, latest_checkpoint
from ...config import TransformerConfig
from ...config.training import OptimizerConfig, PrecisionConfig, ScheduleConfig
from ...parallel import ParallelContext, padding_of, sample_dropout_keys, seed_rank_generator
from ...parallel.data_collectives import sum_over_data_ranks
from ...parallel.pipeline import run_forward, run_pipeline, sum_over_stages
from ..lightning_state import from_json
from .learning_rate import UpdateSchedule
from .optimizer import MixedPrecisionAdamW
from .stock_trainer import check_equal_batches, check_load_options, check_trainer, dtype_of_trainer, reads_no_weights

# Of weights and activations; with fp8 they are bf16, and matrix products are in float8 (`Kernels.float8`).
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = torch.bfloat16

MicroBatch = dict[str, Any]


def _ignore(activity: str) -> None:
    """The default `progress`."""


class TrainingModule(L.LightningModule, ABC):
    """The model, its optimizer and the training step; a subclass has the loss.

    A batch is the list of this data rank's micro-batches of one step, or the only one. Each loss term is its sum over
    all scored positions of the *global* batch divided by their number. Each micro-batch is divided by this number
    before its backward pass, so that any division of the batch over ranks and micro-batches gives the same gradient.
    With `loss_reduction="mean_of_means"` the loss is the mean of the micro-batches' means instead.

    Args:
        optimizer, schedule: AdamW and its learning rate.
        precision: type of the weights, and the loss scale.
        seed: of the weights and the dropout.
        loss_reduction, dropout_seeds: see `RunConfig`.
        compiles: see `MixedPrecisionAdamW`.
        weights_from: a checkpoint whose weights the model starts with; None: they are drawn from the seed.
        drawn: prefixes of parameters that are drawn all the same.
        progress: called with what begins, for the watchdog.

    Attributes:
        config: the model's, kept in its checkpoints; None: a module of other layers, whose tensors are only compared by
            name and shape.
        completed_steps: optimizer steps, including skipped ones.
        step_lr: learning rate of the last step.
        step_terms: this data rank's part of the loss terms of the last step, fp64 [number of terms].

    Communicates:
        per epoch of a user's loader, as `check_equal_batches`. Per step, over the data group: in the last stage one
        all-reduce of the term counts; the gradients, starting within the last backward pass, as `MixedPrecisionAdamW`
        says. With several stages as `run_pipeline`, and one all-reduce of the loss terms over the pipeline.
    """

    loss_terms: Any  # one name per loss term
    config: TransformerConfig | None = None

    def __init__(
        self,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        precision: PrecisionConfig | None,
        seed: int,
        *,
        loss_reduction: str = "token_mean",
        dropout_seeds: str = "unique",
        compiles: bool = False,
        weights_from: Checkpoint | None = None,
        drawn: tuple[str, ...] = (),
        progress: Callable[[str], None] = _ignore,
    ) -> None:
        super().__init__()
        self.optimizer_config, self.schedule, self.precision, self.seed = optimizer, schedule, precision, seed
        self.loss_reduction, self.dropout_seeds, self.compiles = loss_reduction, dropout_seeds, compiles
        self.weights_from, self.drawn, self.progress = weights_from, drawn, progress
        self.model: nn.Module | None = None
        self.completed_steps = 0
        self._has_gradients = False

    @abstractmethod
    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Build this rank's shard; what `weights_from` has need not be drawn."""

    @abstractmethod
    def loss_counts(self, batch: MicroBatch) -> Tensor:
        """Number of scored positions of each loss term in a micro-batch, fp64 [number of terms]."""

    @abstractmethod
    def loss_sums(self, batch: MicroBatch, sample_keys: Tensor | None) -> Tensor:
        """Summed loss of each term over a micro-batch in nats, [number of terms], from a forward pass."""

    @property
    def parallel(self) -> ParallelContext:
        """This rank's place, from the strategy."""
        return self.trainer.strategy.parallel

    @property
    def optimizer(self) -> MixedPrecisionAdamW:
        """The Trainer's only optimizer."""
        return self.trainer.optimizers[0]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Lightning's, by default over the data group: tensor ranks hold equal values."""
        return super().all_gather(data, group or self.parallel.dp_group, sync_grads)

    @property
    def dropout_rank(self) -> int:
        """The data rank whose dropout seeds this rank uses: its own, or with shared seeds rank 0."""
        return 0 if self.dropout_seeds == "shared" else self.parallel.dp_rank

    def training_step(self, batch: list[MicroBatch] | MicroBatch, batch_idx: int) -> Tensor:
        """Compute the gradients of a step; returns its loss on this data rank (those of the ranks add up to it)."""
        batch = batch if isinstance(batch, list) else [batch]
        step, optimizer, parallel = self.completed_steps + 1, self.optimizer, self.parallel
        if batch_idx == 0 and "sample_numbers" not in batch[0]:  # a user's loader, at the start of an epoch
            check_equal_batches(batch, self.trainer.strategy)
        optimizer.zero_grad()
        counts, denominators = [self.loss_counts(micro_batch) for micro_batch in batch], []
        self.step_terms = torch.zeros(len(self.loss_terms), dtype=torch.float64, device=self.device)

        def forward(index: int, micro_batch: MicroBatch, received: Tensor | None) -> Tensor:
            self.progress(f"forward pass of micro-batch {index + 1}")
            seed_rank_generator(self.seed, step, index, self.dropout_rank, parallel.tp_rank, parallel.pp_rank)
            sums = self.compute(micro_batch, received, self.dropout_keys(micro_batch))
            if not parallel.is_last_stage:
                return sums
            if not denominators:  # not before the first forward pass, where the sum would wait for ZeRO-1's weights
                denominators.extend(self._denominators(counts))
            terms = sums / denominators[index].to(sums.dtype)
            self.step_terms += terms.detach().double()
            return self.total_loss(terms)

        def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
            self.progress(f"backward pass of micro-batch {index + 1}")
            scaled = output * optimizer.counters.loss_scale if gradient is None else output
            scaled.backward(gradient)

        calls = forward, backward, optimizer.start_grad_sync
        run_pipeline(batch, *calls, self.empty_hidden_states, self.progress, parallel)
        sum_over_stages(self.step_terms, parallel)
        self.progress("sum of the gradients over the data ranks")
        optimizer.reduce_gradients()
        optimizer.counters.read()  # of the last step, which has long ended on the device
        if isinstance(schedule := self.lr_schedulers(), UpdateSchedule):  # Lightning steps any other, once
            schedule.check()
            schedule.step()
        self.step_lr = optimizer.param_groups[0]["lr"]  # the scheduled rate: this group's factor is 1
        self._has_gradients = True
        # A loader draws its order and its augmentations from this generator: the same on all ranks.
        seed_rank_generator(self.seed, step, -1, 0, 0)
        self.progress("optimizer")
        return self.total_loss(self.step_terms)

    def total_loss(self, terms: Tensor) -> Tensor:
        """The loss of its terms, [number of terms] to []."""
        return terms.sum()

    def compute(self, micro_batch: MicroBatch, received: Tensor | None, sample_keys: Tensor | None) -> Tensor:
        """What this rank's stage computes of a micro-batch: the loss sums, or before the last stage the hidden states.

        Args:
            received: the hidden states of the stage before; None in the first.
        """
        return self.loss_sums(micro_batch, sample_keys)

    def forward_pass(self, micro_batch: MicroBatch, sample_keys: Tensor | None) -> Tensor:
        """`compute` in all stages, one after the other, without a backward pass.

        Communicates:
            as `compute` and `run_forward`.
        """
        compute = partial(self.compute, sample_keys=sample_keys)
        return run_forward(micro_batch, compute, self.empty_hidden_states, self.parallel)

    def empty_hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """An uninitialized tensor for the hidden states that travel between stages, [b, s, h] or [b, s/p, h]."""
        b, s = micro_batch["tokens"].shape
        s = self.parallel.shard(s) if self.parallel.sequence_parallel else s
        dtype = DTYPES[self.precision.dtype]
        return torch.empty(b, s, self.model.config.hidden_size, dtype=dtype, device=self.device)

    def _denominators(self, counts: list[Tensor]) -> list[Tensor]:
        """Divisors of each micro-batch's loss sums, such that all parts of a step add up to its loss."""
        if self.loss_reduction == "mean_of_means":
            return [own.clamp(min=1) * (len(counts) * self.parallel.dp_size) for own in counts]
        return [sum_over_data_ranks(torch.stack(counts).sum(dim=0), self.parallel).clamp(min=1)] * len(counts)

    def dropout_keys(self, batch: MicroBatch) -> Tensor | None:
        """One dropout key per sample; None for a batch without numbers of its samples."""
        numbers = batch.get("dropout_numbers")
        return None if numbers is None else sample_dropout_keys(self.seed, numbers)

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Do nothing: Lightning calls it after `training_step`, which has computed the gradients."""

    def backward(self, loss: Tensor, *args: Any) -> None:
        """Do nothing: the gradients are there.

        Raises:
            ValueError: a subclass returns a loss of its own, whose gradients are not.
        """
        if loss.requires_grad:
            raise ValueError(
                "`training_step` must return the loss of `super().training_step`, which has computed the gradients, "
                "but returns another one; override `loss_sums` to change the loss"
            )

    def _finish_step(self, *args: Any) -> None:
        """Count a completed step. The optimizer calls it: an override of a hook of the module cannot lose it.

        Raises:
            ValueError: a subclass's `training_step` has computed nothing, and the gradients were those of another step.
        """
        if not self._has_gradients:
            raise ValueError("`training_step` must call `super().training_step`, which computes the gradients")
        self._has_gradients = False
        self.completed_steps += 1

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Leave clipping by the global norm to the optimizer; the Trainer's `gradient_clip_val` sets its limit."""
        if gradient_clip_val is not None:
            self.optimizer.max_grad_norm = gradient_clip_val or None

    def configure_model(self) -> None:
        """Build this rank's shard on its device; the strategy has created the groups.

        Raises:
            ValueError: a setting of the Trainer that is not supported (`check_trainer`) or not the module's, or a model
                that cannot be trained (`_check_parameters`).
        """
        check_trainer(self.trainer)
        own, given = self.precision.dtype, self.trainer.precision
        if given != "32-true" and DTYPES[dtype_of_trainer(self.trainer)] != DTYPES[own]:  # the Trainer's default
            raise ValueError(f"`precision` must be the module's ({own}) or left out, but is {given}")
        if self.trainer.state.fn == TrainerFn.FITTING:  # a module that is fitted again counts as its Trainer does
            self.completed_steps = self.trainer.global_step
        if self.model is None:
            self.model = self.build(self.trainer.strategy.root_device, DTYPES[self.precision.dtype])
            self._check_parameters()
            if self.weights_from:
                self.read_weights(self.weights_from)
        elif not all(hasattr(param, "shard") for param in self.model.parameters()):
            raise ValueError(
                "`module` must not be a copy of one whose model is built: its parameters have lost their place"
            )

    def _check_parameters(self) -> None:
        """Check what `build` of a subclass has made.

        Raises:
            ValueError: stages of a model without `config`, or a parameter that still is uninitialized memory.
        """
        if self.config is None and self.parallel.pp_size > 1:
            raise ValueError(f"`pp_size` must be 1 for a module without `config`, but is {self.parallel.pp_size}")
        for name, param in self.model.named_parameters():
            if not (self.weights_from or getattr(param, "is_initialized", False)):
                raise ValueError(
                    f"`build` must initialize every parameter (initialize_parameters(model, seed, self.parallel)), but "
                    f"{name} is not initialized"
                )

    @contextmanager
    def reading(self, checkpoint: Checkpoint) -> Iterator[Callable[[str, Tensor], None]]:
        """Read a checkpoint of any layout; yields a function that fills a tensor with this rank's part of a key's."""
        with checkpoint.reader(padding_of(self.model)) as reader:

            def read_into(key: str, out: Tensor) -> None:
                if not key.partition("/")[2].startswith(self.drawn):
                    reader.read_into(key, out, self.parallel.tp_rank)

            yield read_into

    def read_weights(self, checkpoint: Checkpoint) -> None:
        """Read this rank's shard from a checkpoint.

        Raises:
            CheckpointError: it is of a module without `config`, and of other tensors.
        """
        if self.config is None:
            named = self.model.named_parameters()
            checkpoint.check_shapes({name: tuple(param.shard.full_shape) for name, param in named})
        with self.reading(checkpoint) as read_into:
            for name, param in self.model.named_parameters():
                self.progress(f"reading {name}")
                read_into(f"model/{name}", param.detach())

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **options: Any) -> Self:
        """A module that starts with the weights of a checkpoint, written at any layout, or of a run's newest one.

        Args:
            options: of the constructor; those of `save_hyperparameters` are the checkpoint's, unless they are given.

        Raises:
            CheckpointError: it is missing.
            ValueError: an option of Lightning's (`check_load_options`).
        """
        options = check_load_options(options)
        checkpoint = Checkpoint.open(latest_checkpoint(checkpoint_path))
        saved = from_json(checkpoint.metadata.state.get("lightning", {}).get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}))
        module = cls(**saved | options)
        module.weights_from = checkpoint
        return module

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW over the shard, with fp32 masters from the checkpoint if there is one, and its schedule."""
        parameters = self.model.named_parameters()
        optimizer = MixedPrecisionAdamW(parameters, self.optimizer_config, self.precision, self.parallel, self.compiles)
        if self.weights_from:
            with self.reading(self.weights_from) as read_into:
                optimizer.load_masters(read_into)
        for each in self.model.modules():
            vars(each).pop("before_layer", None)  # of an earlier fit, whose buffer it would keep
        if self.parallel.zero1 and reads_no_weights(self.trainer):
            optimizer.gather_behind(self.model.transformer)
        optimizer.register_step_post_hook(self._finish_step)
        schedule = UpdateSchedule(optimizer, self.schedule, self.optimizer_config.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}
