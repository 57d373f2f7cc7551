"""The loggers that a run may have besides metrics.csv: TensorBoard and Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary

from ..config.pretrain import RunConfig


def optional_loggers(run: RunConfig, run_dir: Path) -> list[Logger]:
    """The loggers that `logger=` switches on."""
    loggers: list[Logger] = []
    if run.logger.tensorboard:
        loggers.append(StepEvents(run_dir, name="tensorboard", version=""))
    if run.logger.wandb:
        from lightning.pytorch.loggers import WandbLogger  # wandb is optional and may not be installed

        loggers.append(WandbLogger(name=run.name, project=run.logger.project, save_dir=run_dir))
    return loggers


class StepEvents(TensorBoardLogger):
    """TensorBoard logger that writes one event per step; Lightning's writes one per metric (0.5 ms more per step)."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write the metrics of one step, by name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)
