"""Pretraining on every rank: agree on what is left to decide, build model, data and Trainer, and fit."""

import time
from functools import partial

import lightning as L
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..data.datamodule import PretrainDataModule
from ..data.sampler import samples_of
from ..models.attention_backend import preferred_backend
from ..results import METRICS
from ..runtime.exit_codes import DONE
from .agreement import agree
from .announcement import warn_of_cost
from .callbacks.checkpointing import Checkpointing
from .callbacks.layer_statistics import LayerStatistics
from .callbacks.profiling import StepProfiler
from .callbacks.progress import ProgressLine
from .callbacks.replica_sentinel import ReplicaSentinel
from .callbacks.sample_digest import SampleDigest
from .callbacks.step_report import StepReport
from .device_memory import check_free_memory
from .loggers import MetricsFile, optional_loggers
from .module import PretrainModule
from .resuming import check_data_digest
from .run import Run
from .run_folder import begin_run_folder, report_failure, write_run_record
from .session import RankSession, new_trainer, run_on_this_rank
from .teacher import Teacher


@record
def pretrain(run: Run) -> int:
    """Train on this rank; rank 0 writes metrics.csv, checkpoints and, at the end, the record into the run folder.

    Returns:
        the exit code; see `exit_codes`. The same on all ranks.
    """
    return run_on_this_rank(run.request, build_trainer(run), partial(train, run))


def train(run: Run, session: RankSession) -> int:
    """Train in a locked run folder, with the process group started; returns the exit code."""
    run = agree(run, session)
    if run.on_gpu:
        check_free_memory(run.needed_bytes, session.strategy)
    with preferred_backend(run.model.attention):
        return train_as_agreed(run, session)


def train_as_agreed(run: Run, session: RankSession) -> int:
    """Train from the checkpoint and with the kernels that all ranks have agreed on; returns the exit code."""
    trainer, start = session.trainer, run.start
    teacher = None if run.teacher is None else run.teacher.load(run, session)
    model = build_module(run, session, teacher)
    samples = samples_of(run.request, run.corpus, run.num_validation_samples)
    if start.resumes:
        check_data_digest(start.checkpoint, samples, session.strategy.ranks)
    by_length = run.request.loss_reduction == "token_mean"
    sizes, cache = (run.batch.micro_batch_size, run.request.data.num_workers), run.teacher and run.teacher.cache
    data = PretrainDataModule(samples, *sizes, by_length, cache)
    metrics, last_step = MetricsFile(session.folder / METRICS, model.validation_metrics), trainer.max_steps
    if not begin_run_folder(run, session, metrics, len(samples.scored)):
        return DONE  # an earlier start has completed the run
    if session.is_first:
        warn_of_cost(run, len(samples.scored))
    trainer.loggers = [metrics, *optional_loggers(run.request, session.folder)]
    report = add_callbacks(run, session)

    if start.step == 0:
        trainer.validate(model, data, verbose=False)
    report.training_from = time.monotonic() - start.train_time_s
    if start.step < last_step:
        trainer.fit(model, data, ckpt_path=start.checkpoint if start.resumes else None)
    else:  # stopped between its last checkpoint and its record
        model.completed_steps = start.step
    report.train_time_s = time.monotonic() - report.training_from

    if session.ending.exit_code != DONE:
        report_failure(session, model.completed_steps, report)
        return session.ending.exit_code
    if report.validated_at != model.completed_steps:
        trainer.validate(model, data, verbose=False)
    session.strategy.ranks.agree(partial(write_run_record, run, session, report), first_rank_only=True)
    return DONE


def build_trainer(run: Run) -> L.Trainer:
    """Lightning's Trainer, whose batches are optimizer steps."""
    trainer = run.request.trainer
    return new_trainer(
        run.request,
        run.layout,
        run.accelerator,
        max_steps=min(trainer.max_steps, trainer.stop_after_steps or trainer.max_steps),
        val_check_interval=trainer.validate_every_steps or trainer.max_steps + 1,
        # False would undo TORCHINDUCTOR_DETERMINISTIC=1; after a deterministic run of the same process it must be said.
        deterministic=run.request.deterministic or (False if torch.are_deterministic_algorithms_enabled() else None),
    )


def build_module(run: Run, session: RankSession, teacher: Teacher | None = None) -> PretrainModule:
    """The Lightning module; it allocates its shard of the model in `configure_model`, on its device."""
    request, start = run.request, run.start
    return PretrainModule(
        run.model,
        start.optimizer,
        start.schedule,
        precision=request.precision,
        seed=request.seed,
        micro_batch_size=request.micro_batch_size,
        loss_reduction=request.loss_reduction,
        dropout_seeds=request.dropout_seeds,
        kernels=run.kernels,
        teacher=teacher,
        weights_from=start.checkpoint,
        progress=session.watchdog.mark,
        logs=False,
    )


def add_callbacks(run: Run, session: RankSession) -> StepReport:
    """Give the Trainer its callbacks, in the order in which they must act; returns the one that reports the steps."""
    request, digest, report = run.request, SampleDigest(), StepReport(run, session)
    callbacks = [digest]
    if request.trainer.check_replicas_every_steps:
        callbacks.append(ReplicaSentinel(request.trainer.check_replicas_every_steps, digest, session.ending))
    if request.trainer.profiler is not None:
        callbacks.append(StepProfiler(session.folder / "profile"))
    callbacks.append(report)
    if request.logger.layer_statistics:
        callbacks.append(LayerStatistics(request.logger.layer_statistics, session.folder))
    if request.trainer.progress_bar:
        callbacks.append(ProgressLine(report))
    callbacks.append(Checkpointing(run, session, report, digest))
    session.trainer.callbacks.extend(callbacks)
    return report
