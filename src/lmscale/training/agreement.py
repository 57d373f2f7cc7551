"""What only the ranks of a run can decide, together: the checkpoint to load, and the kernels."""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import check_model, read_metadata
from ..config import TransformerConfig
from ..config.training import OptimizerConfig, ScheduleConfig
from ..kernels import Kernels
from ..models.attention_backend import fastest_backend
from ..planner.memory import estimate_memory
from ..planner.workload import Workload
from .checkpoints.resuming import CHECKPOINTS, agree_on_checkpoint, check_fit, find_checkpoint, kept_metadata
from .resolve import ResolvedRun
from .session import RankSession
from .step.training_module import DTYPES
from .strategy import TensorParallelStrategy


@dataclass(frozen=True)
class Agreement:
    """What the ranks train with, the same on all of them.

    Args:
        checkpoint: whose weights the model starts with; None: the seed determines them.
        resumes: whether optimizer, schedule and data order continue from the checkpoint too.
        step: steps already done.
        train_time_s: of these steps; nan if the checkpoint is from before it was kept.
        optimizer, schedule: those of the run, or with `resume.schedule=keep` those of `checkpoint`.
        model: the run's, with the attention and recomputation of rank 0.
        kernels: those of rank 0.
    """

    checkpoint: str | None
    resumes: bool
    step: int
    train_time_s: float
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    model: TransformerConfig
    kernels: Kernels

    def describe(self, job: ResolvedRun) -> dict[str, Any]:
        """The run as its files have it: the configuration as requested, with what was decided in place of `auto`."""
        values = job.run.to_dict()
        values["trainer"] |= {"accelerator": job.accelerator, "num_validation_samples": job.num_validation_samples}
        values["model"] |= {"attention": self.model.attention, "recompute": self.model.recompute}
        values["optimizer"] |= asdict(self.optimizer)
        return values | {"compile": self.kernels.compiles, "schedule": asdict(self.schedule)}

    def needed_bytes(self, job: ResolvedRun) -> int:
        """Memory of a rank's tensors, as planned."""
        machine = {"compiles": self.kernels.compiles, "on_gpu": job.on_gpu}
        workload = Workload.of(job.run, self.model.attention, **machine)
        return estimate_memory(replace(workload, config=self.model), job.layout).total


def agree(job: ResolvedRun, session: RankSession) -> Agreement:
    """Choose the checkpoint and the kernels on all ranks, with the run folder locked.

    Raises:
        AgreedError: the checkpoint cannot be used.

    Communicates:
        as `agree_on_checkpoint`, and a few small objects over the world.
    """
    run, strategy = job.run, session.strategy
    session.watchdog.mark("the check of the checkpoint")
    # Until the lock another job may have written checkpoints, and a restart goes on from its own.
    chosen = strategy.ranks.agree(partial(find_checkpoint, run), first_rank_only=True)
    path, resumes = agree_on_checkpoint(run, session.folder, chosen, strategy), False
    optimizer, schedule = run.optimizer, run.schedule
    step, train_time_s = 0, 0.0
    if path is not None:  # may not be that of `resolve`, under torchrun or after falling back to an older one
        found = read_metadata(path)
        check_model(found, job.model, path)
        check = partial(check_fit, run, job.corpus.content_hash, path, found)  # rank 0 looks for a record
        optimizer, schedule = strategy.ranks.broadcast(strategy.ranks.agree(check, first_rank_only=True))
        resumes = Path(path).parent == session.folder / CHECKPOINTS or not run.resume.weights_only
        if resumes:
            step, train_time_s = found.step, found.state.get("train_time_s", math.nan)
    session.watchdog.mark("the choice of kernels")
    model, kernels = agree_on_kernels(job, path if resumes else None, strategy)
    return Agreement(path, resumes, step, train_time_s, optimizer, schedule, model, kernels)


def agree_on_kernels(
    job: ResolvedRun, resumed: str | None, strategy: TensorParallelStrategy
) -> tuple[TransformerConfig, Kernels]:
    """The model and the kernels of rank 0, which measures the attention where that is to be measured.

    With `model.recompute=auto` ranks on GPUs of different sizes would choose different modes, and then deadlock.

    Ranks that were started again continue with the attention of the run's own checkpoint, if a GPU wrote it. What
    earlier jobs of the process compiled is forgotten: torch.compile does not see the order of attention backends, and
    keeps a limited number of graphs of one function.

    Args:
        resumed: the checkpoint that the run continues.

    Communicates:
        one small object from rank 0 to the world.
    """
    attention = job.model.attention
    if job.measures_attention:
        kept = kept_metadata(resumed, on_gpu=True)
        if kept is not None:
            attention = kept.model["attention"]
        elif strategy.is_global_zero:
            dtype, length = DTYPES[job.run.precision.dtype], job.run.data.seq_length
            sizes = job.layout.tp_size, job.run.micro_batch_size, length
            attention = fastest_backend(job.model, *sizes, dtype, strategy.root_device)
    kernels, attention, recompute = strategy.ranks.broadcast((job.kernels, attention, job.model.recompute))
    if kernels.compiles:
        torch.compiler.reset()
    return replace(job.model, attention=attention, recompute=recompute), kernels
