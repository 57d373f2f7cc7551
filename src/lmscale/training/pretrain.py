"""Pretraining from a run's configuration to its record."""

import dataclasses
import gc
import json
import logging
import platform
import shutil
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch.distributed.elastic.multiprocessing.errors import record

from ..checkpoint import TOKENIZER_FOLDER, CheckpointError, read_metadata, remove_unfinished
from ..config import BatchConfig, ParallelConfig, TransformerConfig
from ..data.datamodule import PretrainDataModule
from ..data.prepare import PreparedCorpus, corpus_unigram_cross_entropy, prepare_corpus
from ..perf.flops import dense_peak_flops_per_s
from ..perf.params import count_parameters
from ..results import new_record, write_record
from ..run_config import RunConfig
from .bert_module import BERTModule
from .callbacks import ReplicaSentinel, TrainingBar
from .diagnosis import first_cause
from .exit_codes import DIVERGED, DONE, INTERRUPTED, USER_ERROR
from .gpt_module import GPTModule
from .interruption import Interruption
from .launch import cluster_environment, share_cores
from .metrics_file import MetricsFile
from .module import PretrainModule
from .preflight import check_run
from .resuming import CHECKPOINTS, agree_on_checkpoint, check_certificate, check_fit
from .run_lock import RunLock
from .saving import Checkpointing
from .strategy import TensorParallelStrategy
from .watchdog import Watchdog

# Lightning's notes on devices, tips and rank numbers are not shown. Its warnings are, but for two that do not apply:
# one about its own use of a torch function, one about loaders that cannot resume (ours begins at `completed_steps`).
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")

METRICS, RECORD = "metrics.csv", "record.json"


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
    files: dict[str, str] = field(default_factory=dict)  # texts by path, for the run folder of a run that starts


def prepare_job(run: RunConfig) -> PretrainJob:
    """Check a run from cheap to dear: sizes, memory, checkpoint, then the corpus, which is read and tokenized once.

    Raises:
        ValueError: anything in the configuration that cannot work, in one line.
    """
    accelerator, layout, resume_from = check_run(run)
    corpus = prepare_corpus(run.data, run.tokenizer, run.model["architecture"], run.model.get("vocab_size"))
    config = run.transformer_config(corpus.vocab_size)
    batch = run.check_layout(layout.tp_size, layout.dp_size, corpus.vocab_size)
    job = PretrainJob(run, config, layout, batch, corpus, accelerator, resume_from)
    data = make_datamodule(job)  # refuses a corpus that is too small here, before the ranks would
    if resume_from is not None:
        run = check_fit(run, config, data.corpus_hash, resume_from)
    return dataclasses.replace(job, run=run)


def make_datamodule(job: PretrainJob) -> PretrainDataModule:
    """The run's samples; see `PretrainDataModule` for what it refuses."""
    trainer = job.run.trainer
    return PretrainDataModule(
        job.corpus, job.run.data, job.batch, job.run.seed, trainer.max_steps, trainer.num_validation_samples
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
    strategy = TensorParallelStrategy(job.layout, run.parallel.timeout_minutes)
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
        callbacks=[TrainingBar()] if run.trainer.progress_bar else [],
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
        run_dir, found = strategy.broadcast((Path(run.run_dir), job.resume_from))
        if trainer.is_global_zero:
            run_dir.mkdir(parents=True, exist_ok=True)
        in_use = strategy.first_answer(lock.take(run_dir) if trainer.is_global_zero else None)
        if in_use is not None:
            raise CheckpointError(in_use)
        watchdog.mark("the check of the checkpoint")
        resume_from = agree_on_checkpoint(run, run_dir, found, strategy)
        module = _make_module(job, resume_from, watchdog)
        return _train(job, trainer, module, run_dir, resume_from, last_step, num_threads, interruption)
    except CheckpointError as error:  # the same on every rank
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


def _make_module(job: PretrainJob, resume_from: str | None, watchdog: Watchdog) -> PretrainModule:
    kind = GPTModule if job.config.architecture == "gpt" else BERTModule
    peak = dense_peak_flops_per_s(_device_name(job), job.run.precision.dtype, job.run.trainer.matmul_precision)
    return kind(job.config, job.run, watchdog, peak, weights_from=resume_from)


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
    if is_first:
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_unfinished(checkpoints)
        _announce(job, run_dir, resume_from, start_step, last_step)
    strategy.check_shared(checkpoints)
    if start_step >= last_step:
        if is_first:
            print(f"nothing to do: the checkpoint is at step {start_step} and the run ends at {last_step}")
        return DONE
    if is_first:  # not before: a command that does nothing, or is refused, leaves an earlier run's files alone
        for name, text in ({"config.json": json.dumps(run.to_dict(), indent=1)} | job.files).items():
            (run_dir / name).parent.mkdir(exist_ok=True)
            (run_dir / name).write_text(text, encoding="utf-8")
        # Beside the checkpoints, so that who converts or evaluates one need not look for it.
        (checkpoints / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(Path(job.corpus.folder) / "tokenizer.json", checkpoints / TOKENIZER_FOLDER / "tokenizer.json")
    metrics = MetricsFile(run_dir / METRICS)
    metrics.resume_at(start_step)
    trainer.loggers = [metrics, *_optional_loggers(run, run_dir)]
    if run.trainer.check_replicas_every_steps:
        trainer.callbacks.append(ReplicaSentinel(run.trainer.check_replicas_every_steps))
    trainer.callbacks.append(Checkpointing(checkpoints, run.checkpoint, interruption))
    start = None
    if not start_step:
        trainer.validate(module, data, verbose=False)
        start = module.validation
    started = time.time()
    trainer.fit(module, data, ckpt_path=resume_from if goes_on else None)
    seconds = time.time() - started
    if module.exit_code != DONE:
        _say_why(module, run_dir, checkpoints, strategy, interruption)
        return module.exit_code
    if not module.validated_at == module.completed_steps:
        trainer.validate(module, data, verbose=False)
    if is_first:
        _write_record(job, module, run_dir, start, start_step, seconds, num_threads)
    return DONE


def _say_why(
    module: PretrainModule,
    run_dir: Path,
    checkpoints: Path,
    strategy: TensorParallelStrategy,
    interruption: Interruption,
) -> None:
    """A line on a run that ended before its end; for one that diverged also a file."""
    step = module.completed_steps
    if module.exit_code == DIVERGED:
        reports = strategy.gather(module.diagnosis)
        path = run_dir / f"not_finite_step_{step}.json"
        message = (
            f"error: no finite gradient in more than {module.run.trainer.max_skipped_steps} steps in a row, up to step "
            f"{step}; first {first_cause(reports)}; see {path}"
        )
        if strategy.is_global_zero:
            path.write_text(json.dumps(reports, indent=1), encoding="utf-8")
            print(message, file=sys.stderr, flush=True)
    if module.exit_code == INTERRUPTED and strategy.is_global_zero:
        name = interruption.received.name if interruption.received else "a signal to another rank"
        print(f"stopped by {name} after step {step}, saved in {checkpoints}; go on with resume=auto", flush=True)


def _optional_loggers(run: RunConfig, run_dir: Path) -> list[Logger]:
    loggers: list[Logger] = []
    if run.logger.tensorboard:
        loggers.append(TensorBoardLogger(run_dir, name="tensorboard", version=""))
    if run.logger.wandb:
        from lightning.pytorch.loggers import WandbLogger  # an option: wandb need not be installed

        loggers.append(WandbLogger(name=run.name, project=run.logger.project, save_dir=run_dir))
    return loggers


def _announce(job: PretrainJob, run_dir: Path, resume_from: str | None, start_step: int, last_step: int) -> None:
    """Say what is about to happen, in a few lines."""
    run, config, layout, batch = job.run, job.config, job.layout, job.batch
    parameters = count_parameters(config, layout.tp_size)
    print(
        f"{run.name}: {parameters.total:,} parameters, {parameters.per_rank:,} a rank; {config.num_layers} layers, "
        f"hidden {config.hidden_size}, {config.num_attention_heads} heads, norm order {config.norm_order.value}\n"
        f"ranks: {layout.world_size} = {layout.dp_size} data x {layout.tp_size} tensor on {job.accelerator}; "
        f"{run.precision.dtype}; batch {run.global_batch_size} = {layout.dp_size} x "
        f"{batch.num_micro_batches} micro-steps x {run.micro_batch_size}; {run.data.seq_length} tokens a sequence\n"
        f"steps {start_step} to {last_step} of {run.trainer.max_steps}"
        + (f", resumed from {resume_from}" if resume_from else "")
        + f"\nrun folder: {run_dir}",
        flush=True,
    )
    if resume_from and not run.resume.weights_only:
        schedule = run.schedule
        print(
            f"schedule: {schedule.decay} ({schedule.formula}) over {schedule.decay_steps} updates, warm-up "
            f"{schedule.warmup_steps}, lr {run.optimizer.lr:g} to {schedule.min_lr:g}; resume.schedule="
            f"{run.resume.schedule}",
            flush=True,
        )
    for note in job.corpus.manifest["notes"]:
        print(f"note: {note}", flush=True)
    if run.resume.path == "auto" and resume_from is None:
        print(f"resume=auto found no complete checkpoint in {run_dir / CHECKPOINTS}: starting from step 0", flush=True)


def _write_record(
    job: PretrainJob,
    module: PretrainModule,
    run_dir: Path,
    start: dict[str, float] | None,
    start_step: int,
    seconds: float,
    num_threads: int,
) -> None:
    """The run's JSON record beside its metrics, and its last lines on the terminal."""
    nats, metrics = "nats/token", {}
    for name, value in module.validation.items():
        metrics[name] = {"value": value, "unit": "perplexity" if name.endswith("perplexity") else nats}
    for name, value in (start or {}).items():
        if not name.endswith("perplexity"):
            metrics[name.replace("val/", "val_start/")] = {"value": value, "unit": nats}
    metrics["val/unigram_cross_entropy"] = {"value": corpus_unigram_cross_entropy(job.corpus), "unit": nats}
    metrics["train/loss"] = {"value": module.metrics["train/loss"], "unit": nats}
    metrics["tokens_per_s"] = {"value": module.metrics["tokens_per_s"], "unit": "tokens/s"}
    metrics["train_time"] = {"value": seconds, "unit": "s"}
    metrics["steps"] = {"value": module.completed_steps, "unit": "steps"}
    run_record = new_record(
        name=job.run.name,
        kind="run",
        config=job.run.to_dict() | {"model": job.config.to_dict(), "corpus": job.corpus.manifest},
        seed=job.run.seed,
        metrics=metrics,
        device=_device_name(job),
        layout={"tp_size": job.layout.tp_size, "dp_size": job.layout.dp_size, "threads_per_rank": num_threads},
        steps=[start_step, module.completed_steps],
    )
    write_record(run_record, run_dir / RECORD)
    before = f"{start['val/loss']:.4f} -> " if start else ""
    print(f"validation loss {before}{module.validation['val/loss']:.4f} nats after {module.completed_steps} steps")
    print(f"record: {run_dir / RECORD}", flush=True)
