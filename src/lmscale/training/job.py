"""What the launcher passes to each rank: a checked job. Picklable, a few kilobytes."""

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import BatchConfig, Layout, TransformerConfig
from ..config.finetune import FinetuneConfig
from ..config.pretrain import RunConfig
from ..data.datamodule import PretrainDataModule
from ..data.prepare import PreparedCorpus
from ..kernels import PLAIN, Kernels
from .runtime.gpu_settings import gpu_settings


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run with its layout and device.

    Args:
        files: texts by path, written into the run folder when training starts.
    """

    run: RunConfig | FinetuneConfig
    layout: Layout
    accelerator: str
    files: dict[str, str] = field(default_factory=dict)

    def device_name(self) -> str:
        """Name of the GPU or processor."""
        return torch.cuda.get_device_name() if self.accelerator == "gpu" else platform.processor() or "cpu"

    def settings(self) -> dict[str, Any] | None:
        """What was set in torch for a GPU; None on a CPU."""
        return gpu_settings() if self.accelerator == "gpu" else None


@dataclass(frozen=True, kw_only=True)
class PretrainJob(Job):
    """A pretraining run with its corpus, and the sizes that depend on it.

    Args:
        compile_choice: `compile=` as requested and what it was resolved to, for the first lines of the run.
    """

    run: RunConfig
    config: TransformerConfig
    batch: BatchConfig
    corpus: PreparedCorpus
    resume_from: str | None
    kernels: Kernels = PLAIN
    compile_choice: str = ""

    def build_data(self) -> PretrainDataModule:
        """Build the data module: the run's samples in their order; see `PretrainDataModule` for errors."""
        run, trainer = self.run, self.run.trainer
        by_length = run.loss_reduction == "token_mean"
        return PretrainDataModule(
            self.corpus, run.data, self.batch, run.seed, trainer.max_steps, trainer.num_validation_samples, by_length
        )
