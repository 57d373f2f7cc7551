"""Pretraining from a run's configuration to its record."""

import dataclasses
import time
from pathlib import Path

from lightning.pytorch.loggers import Logger
from torch.distributed.elastic.multiprocessing.errors import record

from ..checkpoint import CheckpointError, read_metadata
from ..config.pretrain import RunConfig
from ..data.prepare import prepare_corpus
from ..planner.flops import dense_peak_flops_per_s
from .callbacks import ReplicaSentinel, TrainingBar
from .job import PretrainJob
from .output.events import StepEvents
from .output.metrics_file import MetricsFile
from .output.profiling import StepProfiler
from .output.reporting import SampleDigest, StepReport
from .output.resuming import CHECKPOINTS, agree_on_checkpoint, check_data_digest, check_fit, find_checkpoint
from .output.run_folder import METRICS, RECORD, announce, prepare_folder, report_failure, write_run_record
from .output.saving import Checkpointing
from .runtime.exit_codes import DONE
from .runtime.preflight import check_run
from .runtime.run import Run, run_on_this_rank
from .step.module import PretrainModule


def prepare_job(run: RunConfig) -> PretrainJob:
    """Check a run the cheap checks first: sizes, memory, checkpoint, then the corpus, which is read and tokenized once.

    Raises:
        ValueError: anything in the configuration that cannot work, in one line.
    """
    run, accelerator, layout, kernels, resume_from = check_run(run)
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
    )
    data = job.make_datamodule()  # refuses a corpus that is too small here, before the ranks would
    if resume_from is not None:
        run = check_fit(run, config, data.corpus_hash, resume_from)
    return dataclasses.replace(job, run=run)


@record
def pretrain(job: PretrainJob) -> int:
    """Train on this rank; rank 0 writes metrics.csv, checkpoints and, at the end, the record into the run folder.

    Returns:
        how the job ends; see `exit_codes`. The same on all ranks.
    """
    run, accumulated = job.run, job.batch.num_micro_batches
    return run_on_this_rank(
        job,
        lambda running: _pretrain(job, running),
        max_steps=min(run.trainer.max_steps, run.trainer.stop_after_steps or run.trainer.max_steps),
        accumulate_grad_batches=accumulated,
        val_check_interval=accumulated * (run.trainer.validate_every_steps or run.trainer.max_steps + 1),
        deterministic=run.deterministic,
    )


def _pretrain(job: PretrainJob, running: Run) -> int:
    run, folder, strategy, trainer = job.run, running.folder, running.strategy, running.trainer
    job, resume_from = _settle_checkpoint(job, running)
    module, data = _make_module(job, resume_from, running), job.make_datamodule()
    is_own = resume_from is not None and Path(resume_from).parent == folder / CHECKPOINTS
    goes_on = is_own or (resume_from is not None and not run.resume.weights_only)
    start_step, last_step = (read_metadata(resume_from).step if goes_on else 0), trainer.max_steps
    if goes_on:
        check_data_digest(resume_from, data, strategy)
    is_over = start_step >= last_step and (folder / RECORD).is_file()
    metrics = MetricsFile(folder / METRICS)
    problem = None
    if running.is_first:
        announce(job, strategy.parallel, folder, resume_from, start_step, last_step)
        if not is_over:  # a command that does nothing leaves an earlier run's files alone
            problem = prepare_folder(job, folder, metrics, start_step)
    problem = strategy.first_error(problem)
    if problem is not None:
        raise CheckpointError(problem)
    if is_over:
        if running.is_first:
            print(f"nothing to do: the checkpoint is at step {start_step} and the run ends at {last_step}")
        return DONE
    strategy.check_shared(folder / CHECKPOINTS)
    trainer.loggers = [metrics, *_optional_loggers(run, folder)]
    report = _add_callbacks(job, running)
    start = None
    if not start_step:
        trainer.validate(module, data, verbose=False)
        start = report.validation
    started = time.time()
    if start_step < last_step:
        trainer.fit(module, data, ckpt_path=resume_from if goes_on else None)
    else:  # ended between its last checkpoint and its record
        module.completed_steps = start_step
    seconds = time.time() - started
    exit_code = running.ending.exit_code
    if exit_code != DONE:
        report_failure(exit_code, module.completed_steps, report, folder, strategy, running.interruption)
        return exit_code
    if not report.validated_at == module.completed_steps:
        trainer.validate(module, data, verbose=False)
    if running.is_first:
        steps = start_step, module.completed_steps
        write_run_record(job, steps, report, folder, start, seconds, running.num_threads)
    return DONE


def _add_callbacks(job: PretrainJob, running: Run) -> StepReport:
    """Give the Trainer what happens beside the steps, in the order in which it must."""
    run, folder, ending = job.run, running.folder, running.ending
    peak = dense_peak_flops_per_s(job.device_name(), run.precision.dtype, run.trainer.matmul_precision)
    digest, report = SampleDigest(), StepReport(run, job.config, peak, running.watchdog, ending)
    callbacks = [digest]
    if run.trainer.check_replicas_every_steps:
        callbacks.append(ReplicaSentinel(run.trainer.check_replicas_every_steps, digest, ending))
    if run.trainer.profiler is not None:
        callbacks.append(StepProfiler(folder / "profile"))
    callbacks.append(report)
    if run.trainer.progress_bar:
        callbacks.append(TrainingBar(report))
    checkpoints = folder / CHECKPOINTS
    callbacks.append(Checkpointing(checkpoints, run, running.interruption, ending, report, digest))
    running.trainer.callbacks.extend(callbacks)
    return report


def _settle_checkpoint(job: PretrainJob, running: Run) -> tuple[PretrainJob, str | None]:
    """All ranks together: the checkpoint to load, and the job under the schedule that goes with it.

    Raises:
        CheckpointError, ScheduleDiffersError: it cannot be used; the same on all ranks.
    """
    running.watchdog.mark("the check of the checkpoint")
    run, strategy = job.run, running.strategy
    found, problem = recheck_checkpoint(run, running.is_first)  # another job may have had the folder until now
    problem = strategy.first_error(problem)
    if problem is not None:
        raise CheckpointError(problem)
    resume_from = agree_on_checkpoint(run, running.folder, found, strategy)
    if resume_from != job.resume_from and resume_from is not None:  # under torchrun, or back to an older one
        corpus_hash = job.make_datamodule().corpus_hash
        job = dataclasses.replace(job, run=check_fit(run, job.config, corpus_hash, resume_from))
    return job, resume_from


def recheck_checkpoint(run: RunConfig, is_first: bool) -> tuple[str | None, str | None]:
    """On rank 0: what `find_checkpoint` says now that the run folder is locked, or why it refuses."""
    try:
        return (find_checkpoint(run) if is_first else None), None
    except ValueError as error:
        return None, str(error)


def _make_module(job: PretrainJob, resume_from: str | None, running: Run) -> PretrainModule:
    run = job.run
    return PretrainModule(
        job.config,
        run.optimizer,
        run.schedule,
        precision=run.precision,
        seed=run.seed,
        loss_reduction=run.loss_reduction,
        dropout_seeds=run.dropout_seeds,
        kernels=job.kernels,
        weights_from=resume_from,
        progress=running.watchdog.mark,
        logs=False,
    )


def _optional_loggers(run: RunConfig, run_dir: Path) -> list[Logger]:
    loggers: list[Logger] = []
    if run.logger.tensorboard:
        loggers.append(StepEvents(run_dir, name="tensorboard", version=""))
    if run.logger.wandb:
        from lightning.pytorch.loggers import WandbLogger  # an option: wandb need not be installed

        loggers.append(WandbLogger(name=run.name, project=run.logger.project, save_dir=run_dir))
    return loggers
