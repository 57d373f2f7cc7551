"""One finetuning from its configuration to its record."""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..checkpoint import TOKENIZER_FOLDER, CheckpointError, remove_unfinished
from ..config import ParallelConfig
from ..config.finetune import FinetuneConfig
from ..parallel import ParallelContext
from ..results import check_no_record, new_record, write_record
from ..training.job import Job
from ..training.output.metrics_file import MetricsFile
from ..training.output.run_folder import describe_channel
from ..training.runtime.exit_codes import DONE
from ..training.runtime.launch import resolve_accelerator, world_from_outside
from ..training.runtime.run import Run, run_on_this_rank
from .batches import ScoringBatches, TrainingSteps
from .features import Features, load_features
from .initial_checkpoint import InitialCheckpoint, check_initial_checkpoint
from .module import FinetuneModule
from .outputs import write_outputs
from .preparing import prepare_features
from .record_kind import record_kind
from .scoring import metric_names
from .sources import check_place

RECORD = "record.json"


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(Job):
    """A finetuning that has passed every check, without its data."""

    run: FinetuneConfig
    start: InitialCheckpoint
    train: Path | None
    sets: dict[str, Path]

    def training_features(self) -> Features | None:
        """What is trained on; None where nothing is."""
        if self.train is None:
            return None
        return load_features(self.train).first(self.run.trainer.max_train_examples)

    def scored_features(self) -> dict[str, Features]:
        """What is scored, by set."""
        return {name: load_features(folder) for name, folder in self.sets.items()}


def prepare_job(run: FinetuneConfig) -> FinetuneJob:
    """Check a finetuning from cheap to dear: machine, checkpoint, files; then read and encode the data.

    Raises:
        ValueError: anything that cannot work, in one line.
    """
    accelerator, task = resolve_accelerator(run.trainer.accelerator), run.task
    check_no_record(run.run_dir)
    places = dict(task.scored_sets())
    if run.trainer.num_epochs:
        check_place(task.train, "task.train")
    for name, place in places.items():
        check_place(place, f"task.{'validation' if name in task.validation else 'test'}.{name}")
    start, tokenizer = check_initial_checkpoint(run)
    layout = _layout(run, accelerator)
    start.config.check_tensor_parallel(layout.tp_size)
    cache = Path(run.cache_dir)
    train = prepare_features(task, task.train, tokenizer, cache) if run.trainer.num_epochs else None
    sets = {name: prepare_features(task, place, tokenizer, cache) for name, place in places.items()}
    job = FinetuneJob(run=run, layout=layout, accelerator=accelerator, start=start, train=train, sets=sets)
    must_have = {f"task.validation.{name}": load_features(sets[name]) for name in task.chosen_on()}
    must_have |= {"task.train": load_features(train)} if train is not None else {}
    for key, features in must_have.items():
        if not features.is_labelled:
            raise ValueError(f"`{key}` must have a label for every example, but has not")
    if task.name == "squad_v2" and not task.chosen_on() and task.null_threshold is None:
        raise ValueError("`task.null_threshold` must be given where `task.validation` has no set, but is null")
    if run.objective is not None:
        names = metric_names(task, job.scored_features(), task.chosen_on())
        if run.objective not in names:
            raise ValueError(f"`objective` must be one of {', '.join(names)}, but is {run.objective!r}")
    return job


def _layout(run: FinetuneConfig, accelerator: str) -> ParallelConfig:
    """The grid of ranks; `dp_size=auto` is what the world leaves, or one (a GPU's) where lmscale starts the ranks."""
    tp_size, dp_size, world = run.parallel.tp_size, run.parallel.dp_size, world_from_outside()
    if tp_size == "auto":
        raise ValueError("`parallel.tp_size` must be a whole number for finetuning, but is 'auto'")
    devices = torch.cuda.device_count() if accelerator == "gpu" else None
    if dp_size == "auto":
        size = world.size if world is not None else devices or tp_size
        dp_size = max(1, size // tp_size)
    layout = ParallelConfig(tp_size, dp_size, zero1=run.parallel.zero1)
    if world is not None and layout.world_size != world.size:
        raise ValueError(
            f"the world size must be `parallel.tp_size` x `parallel.dp_size` ({tp_size} x {dp_size}), "
            f"but {world.size} ranks were started"
        )
    if world is None and devices is not None and layout.world_size > devices:
        raise ValueError(
            f"`parallel.tp_size` x `parallel.dp_size` must be at most the {devices} GPUs here, but is "
            f"{layout.world_size}"
        )
    return layout


@record
def finetune(job: FinetuneJob) -> int:
    """Finetune and score on this rank; rank 0 writes scores, predictions and the record into the run folder.

    Returns:
        how the job ends; see `training.exit_codes`. The same on all ranks.
    """
    run, features = job.run, job.training_features()
    steps_per_epoch = -(-len(features) // run.global_batch_size) if features is not None else 0
    num_steps = steps_per_epoch * run.trainer.num_epochs
    return run_on_this_rank(
        job,
        lambda running: _finetune(job, running, features, steps_per_epoch),
        stops_on_signal=False,
        max_steps=num_steps,
        val_check_interval=steps_per_epoch if run.trainer.score_every_epoch and num_steps else num_steps + 1,
    )


def _prepare_folder(job: FinetuneJob, run_dir: Path) -> str | None:
    """On rank 0: write what is known before the first step; returns why that cannot be, or None."""
    try:
        checkpoints = run_dir / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_unfinished(checkpoints)
        for name, text in job.files.items():
            (run_dir / name).parent.mkdir(exist_ok=True)
            (run_dir / name).write_text(text, encoding="utf-8")
        (run_dir / "scores.jsonl").unlink(missing_ok=True)  # of an attempt that did not come to its record
        source, target = Path(job.start.tokenizer_path), checkpoints / TOKENIZER_FOLDER
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            target.mkdir(exist_ok=True)
            shutil.copyfile(source, target / ("vocab.txt" if source.suffix == ".txt" else "tokenizer.json"))
    except OSError as error:
        return f"the run folder {run_dir} cannot be used: {error}"
    return None


def _finetune(job: FinetuneJob, running: Run, features: Features | None, steps_per_epoch: int) -> int:
    run, trainer, context, num_threads = job.run, running.trainer, running.strategy.parallel, running.num_threads
    problem = running.strategy.first_error(_prepare_folder(job, running.folder) if running.is_first else None)
    if problem is not None:
        raise CheckpointError(problem)
    num_steps, sets = steps_per_epoch * run.trainer.num_epochs, job.scored_features()
    module = FinetuneModule(
        run,
        job.start,
        sets,
        num_steps,
        steps_per_epoch,
        running.folder,
        running.watchdog,
        running.ending,
        num_threads,
    )
    scoring = ScoringBatches(module.sets, run.trainer.scoring_batch_size, context.dp_rank, context.dp_size)
    if trainer.is_global_zero:
        _announce(job, module, features, context)
    if features is not None:
        training = TrainingSteps(
            features,
            run.global_batch_size,
            run.micro_batch_size,
            run.trainer.num_epochs,
            run.seed,
            run.trainer.pool_batches,
            context.dp_rank,
            context.dp_size,
        )
        metrics = MetricsFile(module.run_dir / "metrics.csv")
        metrics.resume_at(0)
        trainer.loggers = [metrics]
        trainer.fit(module, training, scoring)
    if running.ending.exit_code == DONE and module.scored_at != module.completed_steps:
        trainer.validate(module, scoring, verbose=False)
    if running.ending.exit_code != DONE:
        if trainer.is_global_zero:
            print(
                f"error: the training has diverged at step {module.completed_steps}: more than "
                f"{run.trainer.max_skipped_steps} steps in a row without a finite gradient, or scores not finite",
                file=sys.stderr,
                flush=True,
            )
        return running.ending.exit_code
    if trainer.is_global_zero:
        write_outputs(module.run_dir / "predictions", run.task, module.sets, module.predictions, module.logits)
        _write_record(job, module, features, num_threads)
    return DONE


def _announce(job: FinetuneJob, module: FinetuneModule, features: Features | None, context: ParallelContext) -> None:
    run, layout = job.run, job.layout
    size = f"{len(features):,} items" if features is not None else "nothing"
    print(
        f"{run.name}: {run.task.name} from {job.start.path}{' (sizes only)' if run.from_scratch else ''}; trains on "
        f"{size} x {run.trainer.num_epochs} epochs, batch {run.global_batch_size}, lr {run.optimizer.lr:g}; scores "
        + ", ".join(f"{name} ({len(found.ids):,})" for name, found in module.sets.items())
        + f"\nranks: {layout.dp_size} data x {layout.tp_size} tensor on {job.accelerator}"
        f"{describe_channel(context, job.accelerator)}, {run.precision.dtype}; run folder: {module.run_dir}",
        flush=True,
    )
    for found in [*([features] if features is not None else []), *module.sets.values()]:
        for note in found.notes:
            print(f"note: {note}", flush=True)


def _write_record(job: FinetuneJob, module: FinetuneModule, features: Features | None, num_threads: int) -> None:
    """The run's JSON record, and the last line on the terminal."""
    run = job.run
    metrics = {
        name: {"value": value, "unit": "logits" if name.endswith("null_threshold") else "%"}
        for name, value in module.metrics.items()
    }
    metrics["steps"] = {"value": module.completed_steps, "unit": "steps"}
    watch = module.stopwatch
    if watch.wall_s:
        metrics["train_time"] = {"value": watch.wall_s, "unit": "s"}
        metrics["train_cpu_time"] = {"value": watch.cpu_s, "unit": "s"}
        throughput = module.items_trained / watch.wall_s
        metrics["items_per_s"] = {"value": throughput, "unit": "items/s"}
    sets = {name: {"examples": len(f.ids), "items": len(f), "notes": f.notes} for name, f in module.sets.items()}
    for name, prediction in module.predictions.items():
        sets[name]["alarms"] = prediction.alarms
    if features is not None:
        sets["train"] = {"examples": len(features.ids), "items": len(features), "notes": features.notes}
    num_scored = {name: len(f.ids) for name, f in module.sets.items()}
    kind, paper_size = record_kind(run, job.start.config, num_scored, None if features is None else len(features.ids))
    found = new_record(
        name=run.name,
        kind=kind,
        config=run.to_dict() | {"model": job.start.config.to_dict(), "sets": sets, "paper_size": paper_size},
        seed=run.seed,
        metrics=metrics,
        device=job.device_name(),
        layout={"tp_size": job.layout.tp_size, "dp_size": job.layout.dp_size, "threads_per_rank": num_threads},
        steps=[0, module.completed_steps],
        started=time.time() - watch.wall_s,
    )
    write_record(found, module.run_dir / RECORD)
    print(f"record: {module.run_dir / RECORD}", flush=True)
