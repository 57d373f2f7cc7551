"""Pretraining from a run's configuration to its record."""

import dataclasses
import gc
import logging
import platform
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from torch.distributed.elastic.multiprocessing.errors import record

from ..checkpoint import CheckpointError, read_metadata
from ..config import BatchConfig, ParallelConfig, TransformerConfig
from ..config.pretrain import RunConfig
from ..data.datamodule import PretrainDataModule
from ..data.prepare import PreparedCorpus, prepare_corpus
from ..kernels import PLAIN, Kernels
from ..planner.flops import dense_peak_flops_per_s
from .callbacks import ReplicaSentinel, TrainingBar
from .family_module import FamilyModule
from .output.events import StepEvents
from .output.metrics_file import MetricsFile
from .output.profiling import StepProfiler
from .output.resuming import (
    CHECKPOINTS,
    ScheduleDiffersError,
    agree_on_checkpoint,
    check_certificate,
    check_fit,
    find_checkpoint,
)
from .output.run_folder import METRICS, RECORD, announce, prepare_folder, say_why, write_run_record
from .output.saving import Checkpointing
from .runtime.exit_codes import DONE, USER_ERROR
from .runtime.interruption import Interruption
from .runtime.launch import cluster_environment, share_cores
from .runtime.preflight import check_run
from .runtime.run_lock import RunLock
from .runtime.watchdog import Watchdog
from .step.module import PretrainModule
from .strategy import TensorParallelStrategy

# Lightning's notes on devices, tips and rank numbers are not shown. Its warnings are, but for two that do not apply:
# one about its own use of a torch function, one about loaders that cannot resume (ours begins at `completed_steps`).
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")


@dataclass(frozen=True)
class PretrainJob:
    """A run that has passed every check: what each rank is given. Picklable, a few kilobytes."""

    run: RunConfig
    config: TransformerConfig
    layout: ParallelConfig
    batch: BatchConfig
    corpus: PreparedCorpus
    accelerator: str
    resume_from: str | None
    kernels: Kernels = PLAIN
    files: dict[str, str] = field(default_factory=dict)  # texts by path, for the run folder of a run that starts


def prepare_job(run: RunConfig) -> PretrainJob:
    """Check a run from cheap to dear: sizes, memory, checkpoint, then the corpus, which is read and tokenized once.

    Raises:
        ValueError: anything in the configuration that cannot work, in one line.
    """
    run, accelerator, layout, kernels, resume_from = check_run(run)
    corpus = prepare_corpus(run.data, run.tokenizer, run.model.family, run.model.vocab_size)
    config = run.model.with_vocab_size(corpus.vocab_size)
    batch = run.check_layout(layout.tp_size, layout.dp_size, corpus.vocab_size)
    job = PretrainJob(run, config, layout, batch, corpus, accelerator, resume_from, kernels)
    data = make_datamodule(job)  # refuses a corpus that is too small here, before the ranks would
    if resume_from is not None:
        run = check_fit(run, config, data.corpus_hash, resume_from)
    return dataclasses.replace(job, run=run)


def make_datamodule(job: PretrainJob) -> PretrainDataModule:
    """The run's samples; see `PretrainDataModule` for what it refuses."""
    run, trainer = job.run, job.run.trainer
    by_length = run.loss_reduction == "token_mean"
    return PretrainDataModule(
        job.corpus, run.data, job.batch, run.seed, trainer.max_steps, trainer.num_validation_samples, by_length
    )


@record
def pretrain(job: PretrainJob) -> int:
    """Train on this rank; rank 0 writes metrics.csv, checkpoints and, at the end, the record into the run folder.

    Returns:
        how the job ends; see `exit_codes`. The same on all ranks.
    """
    run = job.run
    environment, local_size, num_nodes = cluster_environment()
    torch.set_float32_matmul_precision(run.trainer.matmul_precision)
    strategy = TensorParallelStrategy(job.layout, run.parallel.timeout_minutes, run.parallel.shared_memory)
    last_step = min(run.trainer.max_steps, run.trainer.stop_after_steps or run.trainer.max_steps)
    trainer = L.Trainer(
        accelerator=job.accelerator,
        devices=local_size,
        num_nodes=num_nodes,
        strategy=strategy,
        plugins=[environment],
        max_epochs=-1,
        max_steps=last_step,
        val_check_interval=run.trainer.validate_every_steps or run.trainer.max_steps + 1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[TrainingBar(refresh_rate=4)] if run.trainer.progress_bar else [],
        logger=False,
        deterministic=run.deterministic,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=run.trainer.progress_bar,
    )
    # Lightning's handler for SIGTERM talks to the other ranks, wherever they happen to be.
    trainer._signal_connector.register_signal_handlers = lambda: None
    interruption, lock = Interruption(), RunLock()
    watchdog = Watchdog(environment.global_rank(), 60 * run.parallel.timeout_minutes)
    interruption.install()
    watchdog.start()
    try:
        strategy.setup_environment()
        num_threads = share_cores(local_size, run.trainer.num_threads)  # after Lightning has set its own number
        # Under torchrun every rank has worked out its own folder and checkpoint: rank 0's count.
        run_dir = strategy.broadcast(Path(run.run_dir))
        if trainer.is_global_zero:
            run_dir.mkdir(parents=True, exist_ok=True)
        in_use = strategy.first_answer(lock.take(run_dir) if trainer.is_global_zero else None)
        if in_use is not None:
            raise CheckpointError(in_use)
        watchdog.mark("the check of the checkpoint")
        found, problem = _look_again(run, trainer.is_global_zero)  # another job may have had the folder until now
        problem = strategy.first_answer(problem)
        if problem is not None:
            raise CheckpointError(problem)
        resume_from = agree_on_checkpoint(run, run_dir, found, strategy)
        if resume_from != job.resume_from and resume_from is not None:  # under torchrun, or back to an older one
            corpus_hash = make_datamodule(job).corpus_hash
            job = dataclasses.replace(job, run=check_fit(run, job.config, corpus_hash, resume_from))
        module = _make_module(job, resume_from, watchdog)
        return _train(job, trainer, module, run_dir, resume_from, last_step, num_threads, interruption)
    except (CheckpointError, ScheduleDiffersError) as error:  # the same on every rank
        if trainer.is_global_zero:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    finally:
        watchdog.stop()
        interruption.restore()
        lock.release()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the next job of a sweep in this process finds the memory free
        if job.accelerator == "gpu":
            torch.cuda.empty_cache()


def _look_again(run: RunConfig, is_first: bool) -> tuple[str | None, str | None]:
    """On rank 0: what `find_checkpoint` says now that the run folder is ours, or why it refuses."""
    try:
        return (find_checkpoint(run) if is_first else None), None
    except ValueError as error:
        return None, str(error)


def _make_module(job: PretrainJob, resume_from: str | None, watchdog: Watchdog) -> PretrainModule:
    peak = dense_peak_flops_per_s(_device_name(job), job.run.precision.dtype, job.run.trainer.matmul_precision)
    return FamilyModule(job.config, job.run, watchdog, peak, weights_from=resume_from, kernels=job.kernels)


def _device_name(job: PretrainJob) -> str:
    return torch.cuda.get_device_name() if job.accelerator == "gpu" else platform.processor() or "cpu"


def _train(
    job: PretrainJob,
    trainer: L.Trainer,
    module: PretrainModule,
    run_dir: Path,
    resume_from: str | None,
    last_step: int,
    num_threads: int,
    interruption: Interruption,
) -> int:
    run, is_first, strategy = job.run, trainer.is_global_zero, trainer.strategy
    data, checkpoints = make_datamodule(job), run_dir / CHECKPOINTS
    is_own = resume_from is not None and Path(resume_from).parent == checkpoints
    goes_on = is_own or (resume_from is not None and not run.resume.weights_only)
    start_step = read_metadata(resume_from).step if goes_on else 0
    if goes_on:
        check_certificate(resume_from, data, strategy)
    is_over = start_step >= last_step and (run_dir / RECORD).is_file()
    metrics = MetricsFile(run_dir / METRICS)
    problem = None
    if is_first:
        announce(job, strategy.parallel, run_dir, resume_from, start_step, last_step)
        if not is_over:  # a command that does nothing leaves an earlier run's files alone
            problem = prepare_folder(job, run_dir, metrics, start_step)
    problem = strategy.first_answer(problem)
    if problem is not None:
        raise CheckpointError(problem)
    if is_over:
        if is_first:
            print(f"nothing to do: the checkpoint is at step {start_step} and the run ends at {last_step}")
        return DONE
    strategy.check_shared(checkpoints)
    trainer.loggers = [metrics, *_optional_loggers(run, run_dir)]
    if run.trainer.check_replicas_every_steps:
        trainer.callbacks.append(ReplicaSentinel(run.trainer.check_replicas_every_steps))
    if run.trainer.profiler is not None:
        trainer.callbacks.append(StepProfiler(run_dir / "profile"))
    trainer.callbacks.append(Checkpointing(checkpoints, run.checkpoint, interruption))
    start = None
    if not start_step:
        trainer.validate(module, data, verbose=False)
        start = module.validation
    started = time.time()
    if start_step < last_step:
        trainer.fit(module, data, ckpt_path=resume_from if goes_on else None)
    else:  # ended between its last checkpoint and its record
        module.completed_steps = start_step
    seconds = time.time() - started
    if module.exit_code != DONE:
        say_why(module, run_dir, checkpoints, strategy, interruption)
        return module.exit_code
    if not module.validated_at == module.completed_steps:
        trainer.validate(module, data, verbose=False)
    if is_first:
        write_run_record(job, module, run_dir, start, start_step, seconds, _device_name(job), num_threads)
    return DONE


def _optional_loggers(run: RunConfig, run_dir: Path) -> list[Logger]:
    loggers: list[Logger] = []
    if run.logger.tensorboard:
        loggers.append(StepEvents(run_dir, name="tensorboard", version=""))
    if run.logger.wandb:
        from lightning.pytorch.loggers import WandbLogger  # an option: wandb need not be installed

        loggers.append(WandbLogger(name=run.name, project=run.logger.project, save_dir=run_dir))
    return loggers
