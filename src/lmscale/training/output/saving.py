"""When checkpoints are saved, which are kept, and what happens when one cannot be written."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from ...checkpoint import CheckpointError, checkpoint_name, list_checkpoints, read_metadata, remove_checkpoint
from ...config.pretrain import RunConfig
from ...data.data_digest import digest_text
from ...parallel.data_collectives import sum_over_data_ranks
from ..runtime.ending import Ending
from ..runtime.exit_codes import DONE, INTERRUPTED, NOT_SAVED
from ..runtime.interruption import Interruption
from .reporting import SampleDigest, StepReport


class Checkpointing(L.Callback):
    """Saves by steps, by the clock, when validation finds a new best, when a scheduler asks to stop, and at the end.

    The checkpoint of a step that is validated is saved after its validation, whose loss it knows. A new one is complete
    before an old one goes.

    Args:
        folder: where `step_<n>.ckpt` directories go.
        interruption: whether this process has been asked to stop.
        ending: is told why the run stops.
        report, digest: what is saved of the validation and of the data's order.

    Communicates:
        each step two numbers over the world (does a rank want to stop, is it time to save); a save one all-reduce of a
        number over the data group, and what `TensorParallelStrategy.finish_save` says.
    """

    def __init__(
        self,
        folder: Path,
        run: RunConfig,
        interruption: Interruption,
        ending: Ending,
        report: StepReport,
        digest: SampleDigest,
    ) -> None:
        self.folder, self.run, self.config = folder, run, run.checkpoint
        self.interruption, self.ending, self.report, self.digest = interruption, ending, report, digest
        self.last_saved = 0  # step of the newest complete one
        self.begun: int | None = None  # step of the one being written
        self.saved_at = time.monotonic()
        self.is_due = False
        self.best_losses: list[float] = []  # as many as are kept, lowest first

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What was just resumed need not be saved again, and the best so far is still the best."""
        self.last_saved = pl_module.completed_steps
        self.saved_at = time.monotonic()
        known = [loss for loss, _ in self._scored()] if trainer.is_global_zero else []
        self.best_losses = trainer.strategy.broadcast(known[: self.config.keep_best])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Agree with the other ranks on what is due; save now unless this step is validated first."""
        if not pl_module.is_last_micro_batch:
            return
        step, config = pl_module.completed_steps, self.config
        minutes = (time.monotonic() - self.saved_at) / 60
        by_clock = config.save_every_minutes is not None and minutes >= config.save_every_minutes
        wants_stop, by_clock = trainer.strategy.any_rank(self.interruption.received is not None, by_clock)
        by_steps = config.save_every_steps > 0 and step % config.save_every_steps == 0
        self.is_due = by_steps or by_clock
        every = self.run.trainer.validate_every_steps
        if self.ending.exit_code != DONE:
            return  # a run that has diverged or drifted: what was saved before stands
        if wants_stop and step < trainer.max_steps:  # the last step is the end anyway
            self.ending.stop(trainer, INTERRUPTED)  # saved in `on_train_end`
        elif self.is_due and not (every and step % every == 0):
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The save that waited for the validation, or a new best one."""
        if trainer.state.fn != TrainerFn.FITTING or self.ending.exit_code != DONE:
            return
        loss, is_best = pl_module.validation["val/loss"], False
        if self.config.keep_best is not None and math.isfinite(loss):
            best = sorted([*self.best_losses, loss])[: self.config.keep_best]
            is_best, self.best_losses = best != self.best_losses, best
        if self.is_due or is_best:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step unless it is saved already, and wait until it is on disk."""
        self._finish(trainer, pl_module)
        wanted = self.config.save_last or self.ending.exit_code == INTERRUPTED
        if wanted and self.ending.exit_code in (DONE, INTERRUPTED) and pl_module.completed_steps > self.last_saved:
            self._save(trainer, pl_module)
            self._finish(trainer, pl_module)
            if self.last_saved < pl_module.completed_steps:
                self.ending.exit_code = NOT_SAVED

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to save this step; returns when the tensors may change again."""
        start, step = time.perf_counter(), pl_module.completed_steps
        if step in (self.last_saved, self.begun) or not self._finish(trainer, pl_module):
            return
        self.report.watchdog.mark(f"saving step {step}")
        path, state = self.folder / checkpoint_name(step), self._state(trainer, pl_module)
        trainer.strategy.begin_save(path, self.run.to_dict(), state, self.config.async_, self._remove_old)
        self.begun, self.saved_at = step, time.monotonic()
        if not self.config.async_:
            self._finish(trainer, pl_module)
        self.report.add_checkpoint_time(time.perf_counter() - start)

    def _state(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """What a checkpoint holds besides weights and optimizer: the data digest and the validation of this step."""
        digest = sum_over_data_ranks(self.digest.value.clone(), pl_module.parallel)
        state = {"data_digest": digest_text(int(digest)), "corpus_hash": trainer.datamodule.corpus_hash}
        if self.report.validated_at == pl_module.completed_steps:
            state["validation"] = self.report.validation
        return state

    def _finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Wait for the save that was begun, if any; False where it failed and the run must stop for it."""
        if self.begun is None:
            return True
        step, self.begun = self.begun, None
        error = trainer.strategy.finish_save()
        if error is None:
            self.last_saved = step
            return True
        stops = self.config.on_error == "stop"
        if trainer.is_global_zero:
            kept = f"step_{self.last_saved}.ckpt stays" if self.last_saved else "there is no earlier one"
            then = "the run stops (checkpoint.on_error=stop)" if stops else "training goes on"
            print(f"error: checkpoint of step {step} not saved: {error}; {kept}; {then}", file=sys.stderr, flush=True)
        if stops:
            self.ending.stop(trainer, NOT_SAVED)
        return not stops

    def _scored(self) -> list[tuple[float, Path]]:
        """(validation loss, path) of the complete checkpoints that know theirs, best first."""
        scored = []
        for path in list_checkpoints(self.folder):
            try:
                loss = read_metadata(path).state.get("validation", {}).get("val/loss")
            except CheckpointError:
                continue  # a damaged one is neither best nor removed
            if loss is not None and math.isfinite(loss):
                scored.append((loss, path))
        return sorted(scored)

    def _remove_old(self, newest: Path) -> None:
        """On rank 0, once `newest` is complete: delete what is neither among the newest nor among the best."""
        if self.config.keep_last is None:
            return
        found = list_checkpoints(self.folder)
        kept = set(found[-self.config.keep_last :]) | {newest}
        if self.config.keep_best is not None:
            kept |= {path for _, path in self._scored()[: self.config.keep_best]}
        for path in found:
            if path not in kept:
                remove_checkpoint(path)
