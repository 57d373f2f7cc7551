"""The Lightning module of finetuning, for all tasks: the loss of the head, and the scores of every item."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint import checkpoint_name
from ..config.finetune import FinetuneConfig
from ..parallel.data_collectives import sum_over_data_ranks
from ..runtime.exit_codes import DIVERGED, DONE
from ..training.loggers import LinesFile
from ..training.session import RankSession
from ..training.step.training_module import TrainingModule
from .batches import Batch
from .features import Features
from .heads import build_finetune_model
from .initial_checkpoint import InitialCheckpoint
from .scoring import Predictions, predict_sets
from .tasks import HeadKind


class FinetuneModule(TrainingModule):
    """Finetuning of one BERT.

    The loss is the mean over the items of the global batch, however it is divided over ranks and micro-batches, also in
    the smaller last step of an epoch.

    Args:
        run: the configuration.
        start: the checkpoint.
        sets: features to score, by name.
        steps_per_epoch: for the schedule, and the epoch of each scoring.
        session: the running rank, whose ending is set when the run has diverged.

    Communicates:
        as `TrainingModule`, and the loss if it is logged; per scoring, all logits to all ranks, and the metrics from
        rank 0.
    """

    loss_terms = ("item",)

    def __init__(
        self,
        run: FinetuneConfig,
        start: InitialCheckpoint,
        sets: dict[str, Features],
        steps_per_epoch: int,
        session: RankSession,
    ) -> None:
        drawn = ("pooler.",) if run.new_pooler else ()
        drawn += () if start.has_head else ("head.",)
        super().__init__(
            run.optimizer,
            run.schedule(steps_per_epoch * run.trainer.num_epochs),
            run.precision,
            run.seed,
            weights_from=None if run.from_scratch else start.path,
            drawn=drawn,
            progress=lambda activity: self.watchdog.mark(f"step {self.completed_steps + 1}, {activity}"),
        )
        self.run, self.start, self.config = run, start, start.config
        self.sets, self.run_dir = sets, session.folder
        self.watchdog, self.ending = session.watchdog, session.ending
        self.steps_per_epoch, self.scored_at = steps_per_epoch, -1
        self.scores = LinesFile(self.run_dir / "scores.jsonl")
        self.metrics: dict[str, float] = {}  # of the last scoring, on every rank
        self.predictions: dict[str, Predictions] = {}  # the same, on rank 0
        self.logits: dict[str, list[np.ndarray]] = {}
        self.stopwatch = Timer()
        self.save_problem: str | None = None  # why the checkpoint could not be written; the same on all ranks
        self._found: list[tuple[str, np.ndarray, list[np.ndarray]]] = []

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The encoder with the head of the task."""
        return build_finetune_model(self.run, self.config, self.parallel, dtype, device)

    @contextmanager
    def reading(self, path: str) -> Iterator[Callable[[str, Tensor], None]]:
        """As any module, with the rows of an imported head in the order of the task's classes."""
        with super().reading(path) as read_into:

            def read_in_order(key: str, out: Tensor) -> None:
                read_into(key, out)
                if self.start.head_order is not None and key.partition("/")[2].startswith("head."):
                    out.copy_(out[self.start.head_order])

            yield read_in_order

    def state_for_checkpoint(self) -> dict[str, Any]:
        """The finetuning's part of a checkpoint: the task, so that its head can be reused, and the scores."""
        return {"finetune": {"task": self.run.task.name, "metrics": _for_json(self.metrics)}}

    def loss_counts(self, batch: Batch) -> Tensor:
        """Items of a micro-batch, fp64 [1]."""
        return batch["weights"].sum(dim=0, keepdim=True)

    def loss_sums(self, batch: Batch, sample_keys: Tensor | None) -> Tensor:
        """Summed loss of a micro-batch's items in nats, [1]."""
        losses = self.model.item_losses(self._logits(batch, sample_keys), batch["labels"])
        return (losses * batch["weights"].to(losses.dtype)).sum(dim=0, keepdim=True)

    def _logits(self, batch: Batch, sample_keys: Tensor | None) -> Tensor:
        return self.model(batch["tokens"], batch["token_types"], batch["attention_mask"], sample_keys)

    def on_train_batch_start(self, batch: list[Batch], batch_idx: int) -> None:
        """Start measuring the time of the step."""
        self._step_started = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: list[Batch], batch_idx: int) -> None:
        """Log the completed step; stop a training without finite gradients."""
        step, counters = self.completed_steps, self.optimizer.counters
        if step % self.run.trainer.log_every_steps == 0 or step == self.trainer.max_steps:
            loss = sum_over_data_ranks(self.step_terms, self.parallel).item()
            row = {"train/loss": loss, "lr": self.step_lr}
            row |= {"grad_norm": counters.read().grad_norm, "num_skipped": counters.read().num_skipped}
            row |= {"epoch": step / self.steps_per_epoch, "time/step_s": time.perf_counter() - self._step_started}
            for logger in self.loggers:
                logger.log_metrics(row, step)
        if counters.known.skipped_in_a_row > self.run.trainer.max_skipped_steps:
            self.ending.stop(self.trainer, DIVERGED)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the logits of one batch's items."""
        self.watchdog.mark(f"scoring after step {self.completed_steps}")
        logits = self._logits(batch, None).detach().cpu().double().numpy().astype(np.float32)
        rows = list(logits)
        if self.model.kind is HeadKind.SPAN:
            rows = [row[:, :length].copy() for row, length in zip(rows, batch["lengths"], strict=True)]
        self._found.append((batch["set"], batch["items"], rows))

    def on_validation_epoch_end(self) -> None:
        """Gather all logits and score them on rank 0."""
        ranks = self.trainer.strategy.ranks
        parts = ranks.gather(self._found if self.parallel.tp_rank == 0 else [])
        self._found = []
        scores: dict[str, float] | None = {}
        if self.trainer.is_global_zero:
            self.logits = _assemble(self.sets, [part for of_rank in parts for part in of_rank])
            scores = self._score()
        scores = ranks.broadcast(scores)
        if scores is None:
            self.ending.stop(self.trainer, DIVERGED)
        self.metrics = scores or {}
        self.scored_at = self.completed_steps

    def _score(self) -> dict[str, float] | None:
        """Compute predictions and metrics of all sets; None if scores are not finite."""
        task = self.run.task
        for name, rows in self.logits.items():
            if not all(np.isfinite(row).all() for row in rows):
                print(f"error: the scores of set {name} are not finite: the training has diverged", file=sys.stderr)
                return None
        self.predictions, metrics = predict_sets(task, self.sets, self.logits, task.chosen_on())
        line = {"step": self.completed_steps, "epoch": self.completed_steps / max(1, self.steps_per_epoch)}
        self.scores.append(line | _for_json(metrics))
        shown = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items())
        print(f"step {self.completed_steps}: {shown}", flush=True)
        return metrics

    def on_train_start(self) -> None:
        """Start measuring the training time."""
        self.stopwatch.start()

    def on_validation_start(self) -> None:
        """Stop measuring: scoring is not training time."""
        self.stopwatch.stop()

    def on_validation_end(self) -> None:
        """Measure again if training continues."""
        if self.trainer.state.fn == "fit":
            self.stopwatch.start()

    def on_train_end(self) -> None:
        """Write the checkpoint if `trainer.save` is set and the run has not diverged.

        A failure is kept in `save_problem`: it must not discard the scores.
        """
        self.stopwatch.stop()
        if not self.run.trainer.save or self.ending.exit_code != DONE:
            return
        self.watchdog.mark("saving")
        strategy = self.trainer.strategy
        path = self.run_dir / "checkpoints" / checkpoint_name(self.completed_steps)
        strategy.begin_save(path, self.run.to_dict(), self.state_for_checkpoint())
        self.save_problem = strategy.finish_save()


class Timer:
    """Accumulate wall-clock time and CPU time of this process over intervals: training without scoring and saving.

    On a shared machine, CPU time approximates the wall-clock time of an idle one; it excludes waiting for other ranks.
    """

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 0.0, 0.0
        self._since: tuple[float, float] | None = None

    def start(self) -> None:
        """Start an interval."""
        self._since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Stop the current interval, if any."""
        if self._since is not None:
            self.wall_s += time.perf_counter() - self._since[0]
            self.cpu_s += time.process_time() - self._since[1]
        self._since = None


def _assemble(
    sets: dict[str, Features], parts: list[tuple[str, np.ndarray, list[np.ndarray]]]
) -> dict[str, list[np.ndarray]]:
    """Logits of every item of every set, in the order of the set."""
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in sets}
    for name, items, rows in parts:
        for item, row in zip(items.tolist(), rows, strict=True):
            assert item not in found[name], f"item {item} of {name} was scored twice"
            found[name][item] = row
    for name, features in sets.items():
        assert len(found[name]) == len(features), f"{len(features) - len(found[name])} items of {name} were not scored"
    return {name: [found[name][item] for item in range(len(found[name]))] for name in sets}


def _for_json(metrics: dict[str, float]) -> dict[str, float | str]:
    return {name: value if np.isfinite(value) else str(value) for name, value in metrics.items()}
