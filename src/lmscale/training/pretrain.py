"""Pretraining from a run's configuration to its record."""

import gc
import importlib.util
import json
import logging
import platform
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch.distributed.elastic.multiprocessing.errors import record

from ..config import BatchConfig, ParallelConfig, TransformerConfig
from ..data.datamodule import PretrainDataModule
from ..data.prepare import PreparedCorpus, corpus_unigram_cross_entropy, prepare_corpus
from ..perf.flops import dense_peak_flops_per_s
from ..perf.params import count_parameters
from ..results import new_record, write_record
from ..run_config import STAND_IN_VOCAB_SIZE, RunConfig
from .bert_module import BERTModule
from .callbacks import PeriodicCheckpoint, TrainingBar
from .checkpoint import check_model, checkpoint_step, list_checkpoints, read_metadata
from .gpt_module import GPTModule
from .launch import cluster_environment, resolve_accelerator, share_cores, world_from_outside
from .metrics_file import MetricsFile
from .module import PretrainModule
from .preflight import check_memory, resolve_layout
from .schedule import learning_rate_of_update
from .strategy import TensorParallelStrategy

# Lightning's notes on devices, tips and rank numbers are not shown. Its warnings are, but for two that do not apply:
# one about its own use of a torch function, one about loaders that cannot resume (ours begins at `completed_steps`).
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")

METRICS, RECORD, CHECKPOINTS = "metrics.csv", "record.json", "checkpoints"


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


def prepare_job(run: RunConfig) -> PretrainJob:
    """Check a run from cheap to dear: sizes, memory, checkpoint, then the corpus, which is read and tokenized once.

    Raises:
        ValueError: anything in the configuration that cannot work, in one line.
    """
    # A small vocabulary stands in until the tokenizer is known: padding makes it as good as any for the memory.
    provisional = run.transformer_config(STAND_IN_VOCAB_SIZE)
    accelerator = resolve_accelerator(run.trainer.accelerator)
    world = world_from_outside()
    layout = resolve_layout(run.parallel, provisional, run, world, accelerator)
    batch = BatchConfig(run.micro_batch_size, run.global_batch_size, layout.dp_size)
    if run.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("`logger.wandb` must be false where wandb is not installed (pip install wandb), but is true")
    learning_rate_of_update(1, run.schedule, run.optimizer.lr)  # refuses a schedule that its formula cannot follow
    check_memory(provisional, run, layout, world, accelerator)
    resume_from = find_checkpoint(run.resume, run.run_dir)
    saved = read_metadata(resume_from) if resume_from else None
    corpus = prepare_corpus(run.data, run.tokenizer, provisional.architecture, run.model.get("vocab_size"))
    config = run.transformer_config(corpus.vocab_size)
    config.check_tensor_parallel(layout.tp_size)
    if saved is not None:
        check_model(saved, config.to_dict(), resume_from)
        if run.global_batch_size != saved["run"]["global_batch_size"]:  # a step is a place in the data, too
            raise ValueError(
                f"`global_batch_size` must be that of the checkpoint ({saved['run']['global_batch_size']}), "
                f"but is {run.global_batch_size}"
            )
    job = PretrainJob(run, config, layout, batch, corpus, accelerator, resume_from)
    make_datamodule(job)  # refuses a corpus that is too small here, before the ranks would
    return job


def make_datamodule(job: PretrainJob) -> PretrainDataModule:
    """The run's samples; see `PretrainDataModule` for what it refuses."""
    trainer = job.run.trainer
    return PretrainDataModule(
        job.corpus, job.run.data, job.batch, job.run.seed, trainer.max_steps, trainer.num_validation_samples
    )


def find_checkpoint(resume: str, run_dir: str) -> str | None:
    """The checkpoint that `resume=` means: None, the newest complete one of the run, or a path.

    A path may be a checkpoint or a run folder (then its newest).

    Raises:
        ValueError: the path has no complete checkpoint; the run folder has checkpoints after the step to start from,
            which would be mixed with the run's own.
    """
    own = list_checkpoints(Path(run_dir) / CHECKPOINTS)
    if resume == "none":
        if own:
            raise ValueError(
                f"`resume` must be auto or a path where the run folder has checkpoints ({own[-1].name} in {run_dir}), "
                "but is none; a run from the start needs another hydra.run.dir"
            )
        return None
    if resume == "auto":
        return str(own[-1]) if own else None
    path = Path(resume).absolute()
    if not path.exists():
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {resume!r} does not exist")
    found = list_checkpoints(path / CHECKPOINTS) or list_checkpoints(path)
    chosen = found[-1] if found else path
    if own and read_metadata(chosen)["step"] < checkpoint_step(own[-1]):
        raise ValueError(
            f"`resume` must not be older than the run folder's checkpoints ({own[-1].name} in {run_dir}), "
            f"but is {resume!r}; a run that branches off needs another hydra.run.dir"
        )
    return str(chosen)


@record
def pretrain(job: PretrainJob) -> None:
    """Train on this rank; rank 0 writes metrics.csv, checkpoints and, at the end, the record into the run folder."""
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
    try:
        strategy.setup_environment()
        num_threads = share_cores(local_size, run.trainer.num_threads)  # after Lightning has set its own number
        # Under torchrun every rank has worked out its own folder and checkpoint: rank 0's count.
        run_dir, resume_from = strategy.broadcast((run.run_dir, job.resume_from))
        _train(job, trainer, Path(run_dir), resume_from, last_step, num_threads)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the next job of a sweep in this process finds the memory free
        if job.accelerator == "gpu":
            torch.cuda.empty_cache()


def _train(
    job: PretrainJob, trainer: L.Trainer, run_dir: Path, resume_from: str | None, last_step: int, num_threads: int
) -> None:
    run, is_first = job.run, trainer.strategy.is_global_zero
    device_name = torch.cuda.get_device_name() if job.accelerator == "gpu" else platform.processor() or "cpu"
    peak = dense_peak_flops_per_s(device_name, run.precision.dtype, run.trainer.matmul_precision)
    kind = GPTModule if job.config.architecture == "gpt" else BERTModule
    module = kind(job.config, run, peak)
    data = make_datamodule(job)
    start_step = read_metadata(resume_from)["step"] if resume_from else 0
    if is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(run.to_dict(), indent=1), encoding="utf-8")
        _announce(job, module, run_dir, resume_from, start_step, last_step)
    if start_step >= last_step:
        if is_first:
            print(f"nothing to do: the checkpoint is at step {start_step} and the run ends at {last_step}")
        return
    metrics = MetricsFile(run_dir / METRICS)
    metrics.resume_at(start_step)
    trainer.loggers = [metrics, *_optional_loggers(run, run_dir)]
    trainer.callbacks.append(PeriodicCheckpoint(run_dir / CHECKPOINTS, run.checkpoint))
    start = None
    if not start_step:
        trainer.validate(module, data, verbose=False)
        start = module.validation
    started = time.time()
    trainer.fit(module, data, ckpt_path=resume_from)
    seconds = time.time() - started
    if not module.validated_at == module.completed_steps:
        trainer.validate(module, data, verbose=False)
    if is_first:
        _write_record(job, module, run_dir, start, start_step, seconds, device_name, num_threads)


def _optional_loggers(run: RunConfig, run_dir: Path) -> list[Logger]:
    loggers: list[Logger] = []
    if run.logger.tensorboard:
        loggers.append(TensorBoardLogger(run_dir, name="tensorboard", version=""))
    if run.logger.wandb:
        from lightning.pytorch.loggers import WandbLogger  # an option: wandb need not be installed

        loggers.append(WandbLogger(name=run.name, project=run.logger.project, save_dir=run_dir))
    return loggers


def _announce(
    job: PretrainJob, module: PretrainModule, run_dir: Path, resume_from: str | None, start_step: int, last_step: int
) -> None:
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
    if run.resume == "auto" and resume_from is None:
        print(f"resume=auto found no complete checkpoint in {run_dir / CHECKPOINTS}: starting from step 0", flush=True)


def _write_record(
    job: PretrainJob,
    module: PretrainModule,
    run_dir: Path,
    start: dict[str, float] | None,
    start_step: int,
    seconds: float,
    device_name: str,
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
        device=device_name,
        layout={"tp_size": job.layout.tp_size, "dp_size": job.layout.dp_size, "threads_per_rank": num_threads},
        steps=[start_step, module.completed_steps],
    )
    write_record(run_record, run_dir / RECORD)
    before = f"{start['val/loss']:.4f} -> " if start else ""
    print(f"validation loss {before}{module.validation['val/loss']:.4f} nats after {module.completed_steps} steps")
    print(f"record: {run_dir / RECORD}", flush=True)
