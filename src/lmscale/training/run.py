"""One pretraining with everything decided: what the command passes to its ranks, and what they train. Without torch."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..config import BatchConfig, Layout, TransformerConfig
from ..config.pretrain import RunConfig
from ..config.training import OptimizerConfig, ScheduleConfig
from ..data.prepare import PreparedCorpus
from ..kernels import Kernels
from ..planner.memory import estimate_memory
from ..planner.workload import Workload
from ..results import CHECKPOINTS

T = TypeVar("T")
Open = T | None  # of a field that is None until it is decided


@dataclass(frozen=True)
class Start:
    """Where a run starts, and the optimizer and schedule that it goes on with.

    Args:
        checkpoint: the `Checkpoint` whose weights the model starts with; None: the seed determines them.
        resumes: whether optimizer, schedule and data order continue from the checkpoint too.
        step: steps already done.
        train_time_s: of these steps; nan if the checkpoint is from before it was kept.
        optimizer, schedule: those of the request, or with `resume.schedule=keep` those of `checkpoint`.
    """

    checkpoint: Any
    resumes: bool
    step: int
    train_time_s: float
    optimizer: OptimizerConfig
    schedule: ScheduleConfig

    @classmethod
    def at(cls, checkpoint: Any, request: RunConfig, folder: Path) -> "Start":
        """The start from a checkpoint under the schedule of the request; None: from the initial weights.

        Args:
            folder: the run folder.
        """
        resumes, step, train_time_s = False, 0, 0.0
        if checkpoint is not None:
            resumes = checkpoint.path.parent == folder / CHECKPOINTS or not request.resume.weights_only
        if resumes:
            step, train_time_s = checkpoint.metadata.step, checkpoint.metadata.state.get("train_time_s", math.nan)
        return cls(checkpoint, resumes, step, train_time_s, request.optimizer, request.schedule)

    def kept(self, on_gpu: bool) -> Any:
        """The metadata of the checkpoint whose kernels the run keeps: one that it continues, of the same accelerator.

        Choosing again, on a different number of cores or by another measurement, would change the rounding and draw
        other dropout. A run that goes on from a CPU to a GPU, or back, does so in any case.
        """
        if not self.resumes:
            return None
        metadata = self.checkpoint.metadata
        accelerator = metadata.run.get("trainer", {}).get("accelerator", "auto")  # older versions did not resolve auto
        return metadata if accelerator in ("auto", "gpu" if on_gpu else "cpu") else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A pretraining: what was requested, and what was decided of it. Picklable, a few kilobytes.

    What `check` returns has no corpus: `corpus` is None, `num_validation_samples` too, the vocabulary of `model` a
    stand-in, and `start` goes by the schedule of the request. On the ranks `agree` then decides `start` again, which is
    not sent to them: until the folder is locked another job may write checkpoints, and a checkpoint has the metadata of
    thousands of tensors. It also replaces `model.attention`, if `measures_attention`, and `kernels` and
    `model.recompute` by those of rank 0's machine.

    Args:
        request: the configuration as requested.
        files: texts by path, written into the run folder when training starts.
        model: the one model config of the run.
        compile_choice: `compile=` as requested and what it was resolved to, for the first lines of the run.
        teacher: a `CheckedTeacher`, if the run has one.
        num_validation_samples: sequences scored each time; None: all.
        measures_attention: rank 0 replaces `model.attention` by the fastest.
    """

    request: RunConfig
    files: dict[str, str] = field(default_factory=dict)
    accelerator: Literal["cpu", "gpu"]
    layout: Layout
    batch: BatchConfig
    model: TransformerConfig
    kernels: Kernels
    compile_choice: str
    measures_attention: bool
    start: Open[Start]
    teacher: Any = None
    corpus: Open[PreparedCorpus] = None
    num_validation_samples: int | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.accelerator == "gpu"

    @property
    def workload(self) -> Workload:
        """The run as the planner sees it."""
        found = Workload.of(self.request, compiles=self.kernels.compiles, on_gpu=self.on_gpu)
        taught = {} if self.teacher is None else self.teacher.workload
        return replace(found, config=self.model, **taught)

    @cached_property
    def needed_bytes(self) -> int:
        """Memory of a rank's tensors, as planned."""
        return estimate_memory(self.workload, self.layout).total

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"start": None}

    def describe(self) -> dict[str, Any]:
        """The run as its files have it: as requested, with what was decided in place of `auto`, but for the grid."""
        values = self.request.to_dict()
        values["trainer"] |= {"accelerator": self.accelerator, "num_validation_samples": self.num_validation_samples}
        values["model"] |= {"attention": self.model.attention, "recompute": self.model.recompute}
        values["optimizer"] |= asdict(self.start.optimizer)
        return values | {"compile": self.kernels.compiles, "schedule": asdict(self.start.schedule)}
