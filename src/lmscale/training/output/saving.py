"""When checkpoints are saved, which are kept, and what happens when one cannot be written."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from ...checkpoint import CheckpointError, checkpoint_name, list_checkpoints, read_metadata, remove_checkpoint
from ...config.training import CheckpointConfig
from ..runtime.exit_codes import DONE, INTERRUPTED, NOT_SAVED
from ..runtime.interruption import Interruption


class Checkpointing(L.Callback):
    """Saves by steps, by the clock, when validation finds a new best, when a scheduler asks to stop, and at the end.

    The checkpoint of a step that is validated is saved after its validation, whose loss it knows. A new one is complete
    before an old one goes.

    Args:
        folder: where `step_<n>.ckpt` directories go.
        interruption: whether this process has been asked to stop.

    Communicates:
        each step two numbers over the world (does a rank want to stop, is it time to save); a save communicates what
        `TensorParallelStrategy.begin_save` and `finish_save` say.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, interruption: Interruption) -> None:
        self.folder, self.config, self.interruption = folder, config, interruption
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
        step, config = pl_module.completed_steps, self.config
        minutes = (time.monotonic() - self.saved_at) / 60
        by_clock = config.save_every_minutes is not None and minutes >= config.save_every_minutes
        wants_stop, by_clock = trainer.strategy.any_rank(self.interruption.received is not None, by_clock)
        by_steps = config.save_every_steps > 0 and step % config.save_every_steps == 0
        self.is_due = by_steps or by_clock
        every = pl_module.run.trainer.validate_every_steps
        if pl_module.exit_code != DONE:
            return  # a run that has diverged or drifted: what was saved before stands
        if wants_stop and step < trainer.max_steps:  # the last step is the end anyway
            pl_module.stop(INTERRUPTED)  # saved in `on_train_end`
        elif self.is_due and not (every and step % every == 0):
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The save that waited for the validation, or a new best one."""
        if trainer.state.fn != TrainerFn.FITTING or pl_module.exit_code != DONE:
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
        wanted = self.config.save_last or pl_module.exit_code == INTERRUPTED
        if wanted and pl_module.exit_code in (DONE, INTERRUPTED) and pl_module.completed_steps > self.last_saved:
            self._save(trainer, pl_module)
            self._finish(trainer, pl_module)
            if self.last_saved < pl_module.completed_steps:
                pl_module.exit_code = NOT_SAVED

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to save this step; returns when the tensors may change again."""
        start, step = time.perf_counter(), pl_module.completed_steps
        if step in (self.last_saved, self.begun) or not self._finish(trainer, pl_module):
            return
        pl_module.watchdog.mark(f"saving step {step}")
        run, state = pl_module.run.to_dict(), pl_module.state_for_checkpoint()
        path = self.folder / checkpoint_name(step)
        trainer.strategy.begin_save(path, run, state, self.config.async_, self._remove_old)
        self.begun, self.saved_at = step, time.monotonic()
        if not self.config.async_:
            self._finish(trainer, pl_module)
        pl_module.timer.add("checkpoint", time.perf_counter() - start)

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
            pl_module.stop(NOT_SAVED)
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
