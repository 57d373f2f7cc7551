"""Pretraining on every rank: agree on what is left to decide, build model, data and Trainer, and fit."""

import time
from functools import partial

import lightning as L
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..data.datamodule import PretrainDataModule
from ..data.sampler import samples_of
from ..models.attention_backend import preferred_backend
from ..runtime.exit_codes import DONE
from .agreement import Agreement, agree
from .announcement import warn_of_cost
from .callbacks.order import add_callbacks
from .checkpoints.resuming import check_data_digest
from .device_memory import check_free_memory
from .loggers import MetricsFile, optional_loggers
from .module import PretrainModule
from .resolve import ResolvedRun
from .run_folder import METRICS, begin_run_folder, report_failure, write_run_record
from .session import RankSession, new_trainer, run_on_this_rank


@record
def pretrain(job: ResolvedRun) -> int:
    """Train on this rank; rank 0 writes metrics.csv, checkpoints and, at the end, the record into the run folder.

    Returns:
        the exit code; see `exit_codes`. The same on all ranks.
    """
    return run_on_this_rank(job, build_trainer(job), partial(train, job))


def train(job: ResolvedRun, session: RankSession) -> int:
    """Train in a locked run folder, with the process group started; returns the exit code."""
    agreed = agree(job, session)
    if job.on_gpu:
        check_free_memory(agreed.needed_bytes(job), session.strategy)
    with preferred_backend(agreed.model.attention):
        return train_as_agreed(job, agreed, session)


def train_as_agreed(job: ResolvedRun, agreed: Agreement, session: RankSession) -> int:
    """Train from the checkpoint and with the kernels that all ranks have agreed on; returns the exit code."""
    trainer, folder, started = session.trainer, session.folder, time.time()
    model = build_module(job, agreed, session)
    samples = samples_of(job.run, job.corpus, job.num_validation_samples)
    num_scored = len(samples.scored)
    if agreed.resumes:
        check_data_digest(agreed.checkpoint, samples, session.strategy)
    by_length = job.run.loss_reduction == "token_mean"
    data = PretrainDataModule(samples, job.batch.micro_batch_size, job.run.data.num_workers, by_length)
    metrics, last_step = MetricsFile(folder / METRICS, model.validation_metrics), trainer.max_steps
    if not begin_run_folder(job, agreed, session, metrics, num_scored):
        return DONE  # an earlier start has completed the run
    if session.is_first:
        warn_of_cost(job, num_scored)
    trainer.loggers = [metrics, *optional_loggers(job.run, folder)]
    report = add_callbacks(job, agreed, session)

    losses_at_start = None
    if agreed.step == 0:
        trainer.validate(model, data, verbose=False)
        losses_at_start = report.validation
    report.training_from = time.monotonic() - agreed.train_time_s
    if agreed.step < last_step:
        trainer.fit(model, data, ckpt_path=agreed.checkpoint if agreed.resumes else None)
    else:  # stopped between its last checkpoint and its record
        model.completed_steps = agreed.step
    seconds = time.monotonic() - report.training_from

    step = model.completed_steps
    if session.ending.exit_code != DONE:
        report_failure(session, step, report)
        return session.ending.exit_code
    if report.validated_at != step:
        trainer.validate(model, data, verbose=False)
    write = partial(write_run_record, job, agreed, session, report, step, num_scored, losses_at_start, started, seconds)
    session.strategy.ranks.agree(write, first_rank_only=True)
    return DONE


def build_trainer(job: ResolvedRun) -> L.Trainer:
    """Lightning's Trainer, whose batches are optimizer steps."""
    trainer = job.run.trainer
    return new_trainer(
        job,
        max_steps=min(trainer.max_steps, trainer.stop_after_steps or trainer.max_steps),
        val_check_interval=trainer.validate_every_steps or trainer.max_steps + 1,
        # False would undo TORCHINDUCTOR_DETERMINISTIC=1; after a deterministic run of the same process it must be said.
        deterministic=job.run.deterministic or (False if torch.are_deterministic_algorithms_enabled() else None),
    )


def build_module(job: ResolvedRun, agreed: Agreement, session: RankSession) -> PretrainModule:
    """The Lightning module; it allocates its shard of the model in `configure_model`, on its device."""
    run = job.run
    return PretrainModule(
        agreed.model,
        agreed.optimizer,
        agreed.schedule,
        precision=run.precision,
        seed=run.seed,
        micro_batch_size=run.micro_batch_size,
        loss_reduction=run.loss_reduction,
        dropout_seeds=run.dropout_seeds,
        kernels=agreed.kernels,
        weights_from=agreed.checkpoint,
        progress=session.watchdog.mark,
        logs=False,
    )
