"""When checkpoints are saved, which are kept, and what happens when one cannot be written."""

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from ...checkpoint import Checkpoint, CheckpointError, checkpoint_name, list_checkpoints, remove_checkpoint
from ...data.data_digest import digest_text
from ...parallel.data_collectives import sum_over_data_ranks
from ...results import CHECKPOINTS
from ...runtime.exit_codes import DONE, INTERRUPTED, NOT_SAVED
from ...runtime.messages import print_error
from ..run import Run
from ..session import RankSession
from .sample_digest import SampleDigest
from .step_report import StepReport

_VALIDATED_TOGETHER = 10  # micro-batches between two questions whether to stop


class Checkpointing(L.Callback):
    """Saves by steps, by the clock, when validation finds a new best, when a scheduler asks to stop, and at the end.

    A validated step is saved after its validation, with its loss. If a scheduler asks to stop before that is done, it
    is saved at once and without it, because the scheduler may not wait. An old checkpoint is deleted only when the new
    one is complete.

    Args:
        run: a checkpoint keeps it as `Run.describe` has it.
        session: has the folder, says whether this process has been asked to stop, and is told when the run stops.
        report, digest: give the validation losses and the data digest to save.

    Communicates:
        per step, two numbers over the world (does a rank want to stop, is it time to save), and one per
        `_VALIDATED_TOGETHER` micro-batches of a validation; per save, one all-reduce of a number over the data group,
        and as `TensorParallelStrategy.finish_save`.
    """

    def __init__(self, run: Run, session: RankSession, report: StepReport, digest: SampleDigest) -> None:
        self.request, self.config, self.described = run.request, run.request.checkpoint, run.describe()
        self.state_of_run = {} if run.teacher is None else {"teacher": run.teacher.identity}
        self.folder, self.interruption, self.ending = session.folder / CHECKPOINTS, session.interruption, session.ending
        self.report, self.digest = report, digest
        self.last_saved = 0  # step of the newest complete checkpoint
        self.begun: int | None = None  # step of the checkpoint being written
        self.failed: int | None = None  # step of the newest one that could not be written
        self.saved_at = time.monotonic()
        self.is_due = False
        self.best_losses: list[float] = []  # as many as are kept, lowest first

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start from the resumed step, which is saved already, and the best losses of existing checkpoints."""
        self.last_saved = pl_module.completed_steps
        self.saved_at = time.monotonic()
        if self.config.keep_best is not None:
            known = [loss for loss, _ in self._scored()] if trainer.is_global_zero else []
            self.best_losses = trainer.strategy.ranks.broadcast(known[: self.config.keep_best])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Agree with the other ranks on what is due; save now unless this step is validated first."""
        step, config = pl_module.completed_steps, self.config
        minutes = (time.monotonic() - self.saved_at) / 60
        by_clock = config.save_every_minutes is not None and minutes >= config.save_every_minutes
        wants_stop, by_clock = trainer.strategy.ranks.any(self.interruption.received is not None, by_clock)
        by_steps = config.save_every_steps > 0 and step % config.save_every_steps == 0
        self.is_due = by_steps or by_clock
        every = self.request.trainer.validate_every_steps
        is_validated = every > 0 and step % every == 0
        if self.ending.exit_code != DONE:
            return  # the run has diverged or its replicas differ: keep what was saved before
        if wants_stop and step < trainer.max_steps:  # the last step ends the run anyway
            self.ending.stop(trainer, INTERRUPTED)  # saved in `on_train_end`
            if is_validated:
                self._save(trainer, pl_module)
        elif self.is_due and not is_validated:
            self._save(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Save in the middle of a validation if a scheduler asks to stop."""
        is_asked = (batch_idx + 1) % _VALIDATED_TOGETHER == 0 and pl_module.completed_steps < trainer.max_steps
        if trainer.state.fn != TrainerFn.FITTING or self.ending.exit_code != DONE or not is_asked:
            return
        samples_of_all = len(trainer.datamodule.samples.scored) // pl_module.parallel.dp_size
        if batch_idx >= samples_of_all // self.request.micro_batch_size:
            return  # some rank has no such micro-batch
        (wants_stop,) = trainer.strategy.ranks.any(self.interruption.received is not None)
        if wants_stop:
            self.ending.stop(trainer, INTERRUPTED)
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if a save has waited for this validation, or if its loss is a new best."""
        if trainer.state.fn != TrainerFn.FITTING or self.ending.exit_code != DONE:
            return
        loss, is_best = pl_module.validation["val/loss"], False
        if self.config.keep_best is not None:
            if math.isfinite(loss):
                best = sorted([*self.best_losses, loss])[: self.config.keep_best]
                is_best, self.best_losses = best != self.best_losses, best
            # Kernels tuned on each rank may give other last bits, and all ranks must save or none.
            (is_best,) = trainer.strategy.ranks.any(is_best)
        if self.is_due or is_best:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step unless it is saved already, and wait until it is on disk."""
        self._finish(trainer, pl_module)
        wanted = self.config.save_last or self.ending.exit_code == INTERRUPTED
        step = pl_module.completed_steps
        if wanted and self.ending.exit_code in (DONE, INTERRUPTED) and step > self.last_saved:
            self._save(trainer, pl_module)
            self._finish(trainer, pl_module)
            if self.last_saved < step:
                self.ending.exit_code = NOT_SAVED

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start saving this step unless it is saved; returns when the tensors may change again."""
        start, step = time.perf_counter(), pl_module.completed_steps
        if step in (self.last_saved, self.begun, self.failed) or not self._finish(trainer, pl_module):
            return
        self.report.watchdog.mark(f"saving step {step}")
        path, state = self.folder / checkpoint_name(step), self._state(trainer, pl_module)
        trainer.strategy.begin_save(path, self.described, state, self.config.async_, self._remove_old)
        self.begun, self.saved_at = step, time.monotonic()
        if not self.config.async_:
            self._finish(trainer, pl_module)
        self.report.add_checkpoint_time(time.perf_counter() - start)

    def _state(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """What a checkpoint holds besides weights and optimizer: data digest, training time, this step's validation."""
        digest = sum_over_data_ranks(self.digest.value.clone(), pl_module.parallel)
        state = {"data_digest": digest_text(int(digest)), "corpus_hash": trainer.datamodule.samples.corpus.content_hash}
        state |= self.state_of_run
        state["train_time_s"] = time.monotonic() - self.report.training_from
        if self.report.validated_at == pl_module.completed_steps:
            state["validation"] = self.report.validation
        return state

    def _finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Wait for the save in progress, if any; False if it failed and the run must stop."""
        if self.begun is None:
            return True
        step, self.begun = self.begun, None
        error = trainer.strategy.finish_save()
        if error is None:
            self.last_saved = step
            return True
        self.failed = step
        stops = self.config.on_error == "stop"
        if trainer.is_global_zero:
            kept = f"step_{self.last_saved}.ckpt stays" if self.last_saved else "there is no earlier one"
            then = "training continues"
            if stops:
                then = "the run stops (checkpoint.on_error=stop)"
            elif step >= trainer.max_steps:
                then = f"the run ends without it (exit code {NOT_SAVED})"
            print_error(f"checkpoint of step {step} not saved: {error}; {kept}; {then}")
        if stops:
            self.ending.stop(trainer, NOT_SAVED)
        return not stops

    def _scored(self) -> list[tuple[float, Path]]:
        """(validation loss, path) of the complete checkpoints that have one, best first."""
        scored = []
        for path in list_checkpoints(self.folder):
            try:
                loss = Checkpoint.open(path).metadata.state.get("validation", {}).get("val/loss")
            except CheckpointError:
                continue  # a damaged checkpoint is neither best nor removed
            if loss is not None and math.isfinite(loss):
                scored.append((loss, path))
        return sorted(scored)

    def _remove_old(self, newest: Path) -> None:
        """On rank 0, once `newest` is complete: delete checkpoints that are neither among the newest nor the best."""
        if self.config.keep_last is None:
            return
        found = list_checkpoints(self.folder)
        kept = set(found[-self.config.keep_last :]) | {newest}
        if self.config.keep_best is not None:
            kept |= {path for _, path in self._scored()[: self.config.keep_best]}
        for path in found:
            if path not in kept:
                remove_checkpoint(path)
