"""What the launcher passes to each rank: a checked job. Picklable, a few kilobytes, without torch."""

from dataclasses import dataclass, field
from typing import Literal

from ..config import Layout
from ..config.finetune import FinetuneConfig
from ..config.pretrain import RunConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run with its layout and device.

    Args:
        run: the configuration as requested.
        files: texts by path, written into the run folder when training starts.
    """

    run: RunConfig | FinetuneConfig
    layout: Layout
    accelerator: Literal["cpu", "gpu"]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.accelerator == "gpu"
