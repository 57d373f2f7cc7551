"""What a finetuning does besides its steps: it reports them and scores the sets."""

import time
from typing import Any

import lightning as L
import numpy as np
from torch import Tensor

from ..parallel.data_collectives import sum_over_data_ranks
from ..runtime.exit_codes import DIVERGED
from ..runtime.messages import print_error
from ..training.loggers import LinesFile
from ..training.session import RankSession
from ..training.step.counters import Counters
from .batches import Batch
from .preparing import FinetuneJob
from .scoring import Predictions, predict_sets
from .tasks import HeadKind


class StepReport(L.Callback):
    """Writes the rows of metrics.csv, measures the training time, and stops a training without finite gradients.

    Args:
        job: the finetuning.
        steps_per_epoch: for the epoch of each row.
        session: its watchdog is told of the progress, and its ending is set when the training has diverged.

    Attributes:
        counters: of the optimizer at the last row; None before the first.
        wall_s, cpu_s: wall-clock time and CPU time of this process for training, without scoring and saving. On a
            shared machine, CPU time approximates the wall-clock time of an idle one; it excludes waiting for other
            ranks.

    Communicates:
        per row one all-reduce of the loss over the data group.
    """

    def __init__(self, job: FinetuneJob, steps_per_epoch: int, session: RankSession) -> None:
        self.options, self.steps_per_epoch = job.run.trainer, steps_per_epoch
        self.watchdog, self.ending = session.watchdog, session.ending
        self.counters: Counters | None = None
        self.wall_s = self.cpu_s = 0.0
        self._loss: Tensor | None = None  # of the step, if it has a row

    def _end_interval(self, sign: int = 1) -> None:
        """Add what the clocks show at the end of an interval; with `sign` -1 subtract what they show at its start."""
        self.wall_s += sign * time.perf_counter()
        self.cpu_s += sign * time.process_time()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start measuring, and let the module tell of its passes."""
        pl_module.progress = lambda activity: self.watchdog.mark(f"step {pl_module.completed_steps + 1}, {activity}")
        self._end_interval(-1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop measuring: scoring is not training time."""
        if trainer.state.fn == "fit":
            self._end_interval()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure again."""
        if trainer.state.fn == "fit":
            self._end_interval(-1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop measuring; saving is not training time either."""
        self._end_interval()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Start measuring the time of the step."""
        self._step_started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Sum the loss of a step with a row; after the update, the sum would wait for the weights of ZeRO-1."""
        step, self._loss = pl_module.completed_steps + 1, None
        if step % self.options.log_every_steps == 0 or step == trainer.max_steps:
            self._loss = sum_over_data_ranks(pl_module.step_terms, pl_module.parallel)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Write the row of the step, if it has one; stop a training without finite gradients."""
        step, counters = pl_module.completed_steps, pl_module.optimizer.counters
        if self._loss is not None:
            loss = self._loss.item()
            self.counters = counters.read()
            row = {
                "train/loss": loss,
                "lr": pl_module.step_lr,
                "grad_norm": self.counters.grad_norm,
                "num_skipped": self.counters.num_skipped,
                "epoch": step / self.steps_per_epoch,
                "time/step_s": time.perf_counter() - self._step_started,
            }
            for logger in trainer.loggers:
                logger.log_metrics(row, step)
        if counters.known.skipped_in_a_row > self.options.max_skipped_steps:
            self.ending.stop(trainer, DIVERGED)


class Scoring(L.Callback):
    """Scores all sets on rank 0, after each epoch or at the end, and writes a line of scores.jsonl.

    Args:
        job: the finetuning.
        steps_per_epoch: for the epoch of each line.
        session: has the folder; its ending is set when scores are not finite.

    Attributes:
        sets: features to score, by name.
        metrics: of the last scoring, which followed step `scored_at`, on every rank.
        logits, predictions: the same, on rank 0.

    Communicates:
        per scoring, all logits to all ranks, and the metrics from rank 0.
    """

    def __init__(self, job: FinetuneJob, steps_per_epoch: int, session: RankSession) -> None:
        self.task, self.sets, self.steps_per_epoch = job.run.task, job.scored_features(), steps_per_epoch
        self.watchdog, self.ending = session.watchdog, session.ending
        self.lines = LinesFile(session.folder / "scores.jsonl")
        self.scored_at = -1
        self.metrics: dict[str, float] = {}
        self.logits: dict[str, list[np.ndarray]] = {}
        self.predictions: dict[str, Predictions] = {}
        self._found: dict[tuple[str, int], np.ndarray] = {}  # logits of this rank's items, by set and number

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Report progress to the watchdog."""
        self.watchdog.mark(f"scoring after step {pl_module.completed_steps}")

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Tensor, batch: Batch, *_: Any
    ) -> None:
        """Keep the logits of one batch's items."""
        rows = list(outputs.float().cpu().numpy())
        if pl_module.model.kind is HeadKind.SPAN:
            rows = [row[:, :length].copy() for row, length in zip(rows, batch["lengths"], strict=True)]
        self._found |= {(batch["set"], item): row for item, row in zip(batch["items"].tolist(), rows, strict=True)}

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather all logits and score them on rank 0."""
        ranks, self.scored_at = trainer.strategy.ranks, pl_module.completed_steps
        parts = ranks.gather(self._found if pl_module.parallel.tp_rank == 0 else {})
        self._found, scores = {}, None
        if trainer.is_global_zero:
            found = {key: row for part in parts for key, row in part.items()}
            assert len(found) == sum(map(len, parts)) == sum(map(len, self.sets.values())), "not all were scored once"
            self.logits = {name: [found[name, n] for n in range(len(each))] for name, each in self.sets.items()}
            scores = self._score()
        scores = ranks.broadcast(scores)
        if scores is None:
            self.ending.stop(trainer, DIVERGED)
        self.metrics = scores or {}

    def _score(self) -> dict[str, float] | None:
        """Compute predictions and metrics of all sets; None if logits are not finite."""
        for name, rows in self.logits.items():
            if not all(np.isfinite(row).all() for row in rows):
                print_error(f"the scores of set {name} are not finite: the training has diverged")
                return None
        self.predictions, metrics = predict_sets(self.task, self.sets, self.logits, self.task.chosen_on())
        epoch = self.scored_at / max(1, self.steps_per_epoch)
        self.lines.append({"step": self.scored_at, "epoch": epoch} | for_json(metrics))
        shown = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items())
        print(f"step {self.scored_at}: {shown}", flush=True)
        for alarm in (alarm for prediction in self.predictions.values() for alarm in prediction.alarms):
            print(f"WARNING: {alarm}", flush=True)
        return metrics


def for_json(metrics: dict[str, float]) -> dict[str, float | str]:
    """The metrics with those that are not finite as text."""
    return {name: value if np.isfinite(value) else str(value) for name, value in metrics.items()}
