"""What happens beside training: checkpoints and the bar."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar

from ..run_config import CheckpointConfig
from .checkpoint import checkpoint_name, list_checkpoints


class PeriodicCheckpoint(L.Callback):
    """Saves every so many steps and at the end, and keeps the newest; a new one is complete before an old one goes.

    Args:
        folder: where `step_<n>.ckpt` directories go.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config
        self.last_saved = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What was just resumed need not be saved again."""
        self.last_saved = pl_module.completed_steps

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Save where the step is due."""
        if self.config.save_every_steps and pl_module.completed_steps % self.config.save_every_steps == 0:
            self._save(trainer, pl_module.completed_steps)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step unless it is saved already."""
        if self.config.save_last and pl_module.completed_steps > self.last_saved:
            self._save(trainer, pl_module.completed_steps)

    def _save(self, trainer: L.Trainer, step: int) -> None:
        trainer.save_checkpoint(self.folder / checkpoint_name(step))
        self.last_saved = step
        if self.config.keep_last is not None and trainer.is_global_zero:
            for old in list_checkpoints(self.folder)[: -self.config.keep_last]:
                trainer.strategy.remove_checkpoint(old)


class TrainingBar(RichProgressBar):
    """Lightning's Rich bar with the figures of the last reported step: loss, lr, norm, speed, memory."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "Training"

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        """Short strings for the end of the bar."""
        metrics = pl_module.metrics
        if not metrics:
            return {}
        shown = {
            "loss": f"{metrics['train/loss']:.3f}",
            "lr": f"{metrics['lr']:.2e}",
            "grad_norm": f"{metrics['grad_norm']:.2f}",
            "tok/s": f"{metrics['tokens_per_s']:,.0f}",
            "TFLOP/s": f"{metrics['tflops_per_s_per_device']:.3g}",
            "GiB": f"{metrics['memory_gib']:.2f}",
        }
        if pl_module.run.precision.dtype == "fp16":
            shown["scale"] = f"{metrics['loss_scale']:.3g}"
        if "mfu" in metrics:
            shown["MFU"] = f"{metrics['mfu']:.1%}"
        if pl_module.validation:
            shown["val"] = f"{pl_module.validation['val/loss']:.3f}"
        return shown
