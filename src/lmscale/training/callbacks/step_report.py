"""What a run reports of its steps: metrics, time per phase, and a diagnosis if it diverges."""

import time
from typing import Any

import lightning as L
from torch import Tensor

from ...parallel.data_collectives import sum_over_data_ranks
from ...planner.flops import dense_peak_flops_per_s, model_flops_per_step, teacher_flops
from ...runtime.exit_codes import DIVERGED
from ...runtime.machine import device_name
from ..diagnosis import diagnose
from ..run import Run
from ..session import RankSession
from ..step.counters import Counters
from ..step.layer_gradients import layer_gradient_norms
from ..timing import PhaseTimer, memory_in_use

EXCHANGE = "exchange"  # of hidden states between stages, most of it waiting
PHASES = ("step", "data", "forward", "backward", "optimizer", "checkpoint", EXCHANGE)


class StepReport(L.Callback):
    """Reports progress to the watchdog and metrics to the loggers; times are means since the last row.

    It precedes `Checkpointing` among the callbacks, so that the row of a step is on disk before its checkpoint.

    Args:
        session: its watchdog is told of the progress, and its ending is set when the run has diverged.

    Attributes:
        metrics: the last row.
        counters: of the optimizer at the last row; None before the first.
        validation: the losses of the last validation, taken after step `validated_at`.
        validation_at_start: those before the first step; empty after a resume.
        diagnosis: of this rank, once the run has diverged.
        training_from: when training would have begun without interruptions, by the monotonic clock.
        train_time_s: of training alone, by all starts, once it has ended.

    Communicates:
        per row one all-reduce of the loss terms over the data group; with `logger.layer_grad_norms` also
        as `gradient_norms_of_parts`.
    """

    def __init__(self, run: Run, session: RankSession) -> None:
        self.request = request = run.request
        self.watchdog, self.ending = session.watchdog, session.ending
        numbers = device_name(run.on_gpu), request.precision.dtype, request.trainer.matmul_precision
        self.peak_flops_per_s = dense_peak_flops_per_s(*numbers)
        sizes = request.data.seq_length, request.global_batch_size
        self.flops_per_step = model_flops_per_step(run.model, *sizes) + teacher_flops(run.workload.models[1:], *sizes)
        self.metrics: dict[str, float] = {}
        self.counters: Counters | None = None
        self.validation: dict[str, float] = {}
        self.validation_at_start: dict[str, float] = {}
        self.validated_at = -1
        self.diagnosis: dict[str, Any] = {}
        self.training_from = time.monotonic()
        self.train_time_s = 0.0
        self._losses: Tensor | None = None  # of the step, if it has a row
        self._layer_norms: dict[str, float] = {}
        self._batch_end: float | None = None
        self._steps_since_row = 0
        self.timer: PhaseTimer | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the timer, and let the module tell of its passes."""
        self.timer = timer = PhaseTimer(pl_module.device)
        context = pl_module.parallel
        stage = f", stage {context.pp_rank} of {context.pp_size}" if context.pp_size > 1 else ""

        def progress(activity: str) -> None:
            self.watchdog.mark(f"step {pl_module.completed_steps + 1}, {activity}{stage}")
            phase = activity.partition(" ")[0]
            if phase in PHASES:  # the sum of the gradients counts as part of the backward pass before it
                timer.enter(phase)

        pl_module.progress = progress

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Count the time since the end of the last step as data loading."""
        now = time.perf_counter()
        self._step_start = self._batch_end or now
        self.timer.add("data", now - self._step_start)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Sum the losses of a reported step, and compute the norms of its complete gradients, if asked for.

        After the update, the sum would wait for the weights of ZeRO-1.
        """
        self._losses = None
        if self._reports(trainer, pl_module.completed_steps + 1):
            self._losses = sum_over_data_ranks(pl_module.step_terms, pl_module.parallel)
            if self.request.logger.layer_grad_norms:
                self._layer_norms = layer_gradient_norms(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the row of the step, if it has one; stop a run without finite gradients."""
        self.timer.enter(None)
        step, optimizer = pl_module.completed_steps, pl_module.optimizer
        self._steps_since_row += 1
        if self._losses is None and self._reports(trainer, step):  # a callback before this one has ended the run
            self._losses = sum_over_data_ranks(pl_module.step_terms, pl_module.parallel)
        losses = None if self._losses is None else self._losses.tolist()
        self.timer.add("step", time.perf_counter() - self._step_start)
        if losses is not None:
            self._write_row(trainer, pl_module, losses)
        # The host does not wait for the GPU: without a row it learns of a skipped step one step later.
        counters, limit = optimizer.counters, self.request.trainer.max_skipped_steps
        if counters.known.skipped_in_a_row > limit and counters.read().skipped_in_a_row > limit:
            self.diagnosis = diagnose(pl_module, batch)
            self.ending.stop(trainer, DIVERGED)
        self.watchdog.mark(f"data for step {step + 1}")
        self._batch_end = time.perf_counter()

    def _reports(self, trainer: L.Trainer, step: int) -> bool:
        """Whether the step has a row; a validated step always has one, for its validation losses."""
        end = trainer.max_steps
        intervals = (self.request.logger.log_every_steps, self.request.trainer.validate_every_steps or end, end)
        return any(step % interval == 0 for interval in intervals)

    def _write_row(self, trainer: L.Trainer, pl_module: L.LightningModule, losses: list[float]) -> None:
        self.counters = counters = pl_module.optimizer.counters.read()
        context = pl_module.parallel
        seconds = {name: total / self._steps_since_row for name, total in self.timer.read().items()}
        self._steps_since_row = 0
        tokens = self.request.global_batch_size * self.request.data.seq_length
        flops_per_s = self.flops_per_step / seconds["step"] / (context.tp_size * context.pp_size * context.dp_size)
        metrics = pl_module.named_losses("train", losses) | {
            "lr": pl_module.step_lr,
            "grad_norm": counters.grad_norm,
            **{f"grad_norm/{part}": norm for part, norm in self._layer_norms.items()},
            "loss_scale": counters.loss_scale,
            "num_skipped": counters.num_skipped,
            "tokens_per_s": tokens / seconds["step"],
            "tflops_per_s_per_device": flops_per_s / 1e12,
        }
        if self.peak_flops_per_s is not None:
            metrics["mfu"] = flops_per_s / self.peak_flops_per_s
        metrics["memory_gib"] = memory_in_use(pl_module.device) / 2**30
        shown = (phase for phase in PHASES if phase != EXCHANGE or context.pp_size > 1)
        metrics |= {f"time/{phase}_s": seconds.get(phase, 0.0) for phase in shown}
        self.metrics = metrics
        for logger in trainer.loggers:
            logger.log_metrics(metrics, pl_module.completed_steps)

    def add_checkpoint_time(self, seconds: float) -> None:
        """Count the time of saving, which belongs neither to the step before it nor to the one after."""
        self.timer.add("checkpoint", seconds)
        if self._batch_end is not None:
            self._batch_end += seconds

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Report progress to the watchdog."""
        self.watchdog.mark(f"validation after step {pl_module.completed_steps}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the validation losses to the row of their step; the time of validation belongs to no step."""
        self.validation, self.validated_at = pl_module.validation, pl_module.completed_steps
        if self.validated_at == 0:
            self.validation_at_start = self.validation
        for logger in trainer.loggers:
            logger.log_metrics(self.validation, self.validated_at)
        self._batch_end = time.perf_counter()
