"""Pretraining: `prepare_job` checks a run once; `pretrain`, on every rank, builds model, data and Trainer, and fits."""

import dataclasses
import sys
import time
from functools import partial

import lightning as L
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..config.pretrain import RunConfig
from ..data.prepare import prepare_corpus, warn_of_repetition
from ..models.attention_backend import preferred_backend
from .callbacks.order import add_callbacks
from .job import PretrainJob
from .module import PretrainModule
from .output.announcement import warn_of_costly_validation
from .output.events import optional_loggers
from .output.metrics_file import MetricsFile
from .output.resuming import Start, check_data_digest, check_fit, choose_start
from .output.run_folder import (
    METRICS,
    begin_run_folder,
    report_failure,
    write_run_record,
)
from .runtime.exit_codes import DONE
from .runtime.kernel_choice import describe_compile, settle_kernels
from .runtime.preflight import check_run
from .runtime.run import Run, new_trainer, run_on_this_rank


def prepare_job(run: RunConfig) -> PretrainJob:
    """Check a run, cheap checks first: sizes, memory, checkpoint; then read and tokenize the corpus once.

    Raises:
        ValueError: anything invalid in the configuration, in one line.
    """
    requested = run
    run, accelerator, layout, kernels, resume_from = check_run(requested)
    corpus = prepare_corpus(run.data, run.tokenizer, run.model.family, run.model.vocab_size)
    config = run.model.with_vocab_size(corpus.vocab_size)
    batch = run.check_layout(layout.tp_size, layout.dp_size, corpus.vocab_size)
    job = PretrainJob(
        run=run,
        config=config,
        layout=layout,
        batch=batch,
        corpus=corpus,
        accelerator=accelerator,
        resume_from=resume_from,
        kernels=kernels,
        compile_choice=describe_compile(requested, accelerator == "gpu", resume_from, kernels.compiles),
    )
    data = job.build_data()  # raises here, before any rank starts, if the corpus is too small
    if resume_from is not None:
        run = check_fit(run, config, data.corpus_hash, resume_from)
    return dataclasses.replace(job, run=run)


@record
def pretrain(job: PretrainJob) -> int:
    """Train on this rank; rank 0 writes metrics.csv, checkpoints and, at the end, the record into the run folder.

    Returns:
        the exit code; see `exit_codes`. The same on all ranks.
    """
    return run_on_this_rank(job, build_trainer(job), partial(train, job))


def train(job: PretrainJob, running: Run) -> int:
    """Train in a locked run folder, with the process group started; returns the exit code."""
    running.watchdog.mark("the check of the checkpoint")
    job, start = choose_start(job, running.folder, running.strategy)
    running.watchdog.mark("the choice of kernels")
    job = settle_kernels(job, start, running.strategy)
    with preferred_backend(job.config.attention):
        return train_from(job, start, running)


def train_from(job: PretrainJob, start: Start, running: Run) -> int:
    """Train from `start` with kernels that all ranks have agreed on; returns the exit code."""
    trainer, folder, strategy, started = running.trainer, running.folder, running.strategy, time.time()
    model = build_module(job, start, running)
    data = job.build_data()
    if start.resumes:
        check_data_digest(start.checkpoint, data, strategy)
    metrics, last_step = MetricsFile(folder / METRICS, model.validation_metrics), trainer.max_steps
    if not begin_run_folder(job, folder, start, last_step, metrics, strategy):
        return DONE  # an earlier start has completed the run
    if running.is_first:
        read = job.run.trainer.max_steps * job.run.global_batch_size * job.run.data.seq_length
        warnings = warn_of_costly_validation(job.run, data.num_validation_samples), warn_of_repetition(job.corpus, read)
        print(*warnings, sep="", end="", file=sys.stderr, flush=True)
    trainer.loggers = [metrics, *optional_loggers(job.run, folder)]
    report = add_callbacks(job, running)

    losses_at_start = None
    if start.step == 0:
        trainer.validate(model, data, verbose=False)
        losses_at_start = report.validation
    training_from = time.time()
    if start.step < last_step:
        trainer.fit(model, data, ckpt_path=start.checkpoint if start.resumes else None)
    else:  # stopped between its last checkpoint and its record
        model.completed_steps = start.step
    seconds = time.time() - training_from

    exit_code, step = running.ending.exit_code, model.completed_steps
    if exit_code != DONE:
        report_failure(exit_code, step, report, folder, strategy, running.interruption)
        return exit_code
    if report.validated_at != step:
        trainer.validate(model, data, verbose=False)
    if running.is_first:
        times = started, seconds
        write_run_record(job, (start.step, step), report, folder, losses_at_start, *times, running.num_threads)
    return DONE


def build_trainer(job: PretrainJob) -> L.Trainer:
    """Lightning's Trainer, whose batches are optimizer steps."""
    trainer = job.run.trainer
    return new_trainer(
        job,
        max_steps=min(trainer.max_steps, trainer.stop_after_steps or trainer.max_steps),
        val_check_interval=trainer.validate_every_steps or trainer.max_steps + 1,
        # False would undo TORCHINDUCTOR_DETERMINISTIC=1; after a deterministic run of the same process it must be said.
        deterministic=job.run.deterministic or (False if torch.are_deterministic_algorithms_enabled() else None),
    )


def build_module(job: PretrainJob, start: Start, running: Run) -> PretrainModule:
    """The Lightning module; it allocates its shard of the model in `configure_model`, on its device."""
    run = job.run
    return PretrainModule(
        job.config,
        run.optimizer,
        run.schedule,
        precision=run.precision,
        seed=run.seed,
        micro_batch_size=run.micro_batch_size,
        loss_reduction=run.loss_reduction,
        dropout_seeds=run.dropout_seeds,
        kernels=job.kernels,
        weights_from=start.checkpoint,
        progress=running.watchdog.mark,
        logs=False,
    )
