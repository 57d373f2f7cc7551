"""What a finetuning writes into its run folder and on the terminal, besides its metrics and checkpoint."""

import shutil
import time
from pathlib import Path

from ..parallel import ParallelContext
from ..results import new_record, write_record
from ..runtime.accelerator import gpu_settings
from ..runtime.machine import device_name
from ..runtime.run_lock import run_folder_errors
from ..training.announcement import describe_channel
from ..training.diagnosis import count_updates
from ..training.loggers import training_losses
from ..training.run_folder import warn_of_no_progress, write_first_files
from .features import Features
from .module import FinetuneModule
from .outputs import write_outputs
from .preparing import FinetuneJob
from .record_kind import record_kind
from .scoring import with_units

RECORD = "record.json"


def prepare_folder(job: FinetuneJob, run_dir: Path) -> None:
    """Write the files that precede the first step.

    Raises:
        ValueError: the folder cannot be written.
    """
    with run_folder_errors(run_dir):
        # Not a copy of the tokenizer's files: settings beside a vocabulary would be left behind.
        write_first_files(run_dir, job.files, job.start.tokenizer.encode())
        # Of an attempt that wrote no record.
        (run_dir / "scores.jsonl").unlink(missing_ok=True)
        shutil.rmtree(run_dir / "predictions", ignore_errors=True)


def announce(job: FinetuneJob, module: FinetuneModule, features: Features | None, context: ParallelContext) -> None:
    """Print the task, its data, the layout and the run folder."""
    run, layout = job.run, job.layout
    work = f"{len(features):,} items x {run.trainer.num_epochs} epochs" if features is not None else "nothing"
    print(
        f"{run.name}: {run.task.name} from {job.start.path}{' (sizes only)' if run.from_scratch else ''}; trains on "
        f"{work}, batch {run.global_batch_size}, lr {run.optimizer.lr:g}; scores "
        + ", ".join(f"{name} ({len(found.ids):,})" for name, found in module.sets.items())
        + f"\nranks: {layout.dp_size} data x {layout.tp_size} tensor on {job.accelerator}"
        f"{describe_channel(context, job.accelerator)}, {run.precision.dtype}; run folder: {module.run_dir}",
        flush=True,
    )
    sets = [*([features] if features is not None else []), *module.sets.values()]
    for note in dict.fromkeys(note for found in sets for note in found.notes):  # a file may be used twice
        print(f"note: {note}", flush=True)


def write_results(job: FinetuneJob, module: FinetuneModule, features: Features | None, num_threads: int) -> None:
    """Write the predictions and the run's JSON record, and print the last line on the terminal."""
    run = job.run
    module.scores.finalize()
    write_outputs(module.run_dir / "predictions", run.task, module.sets, module.predictions, module.logits)
    metrics = with_units(module.metrics)
    metrics["steps"] = {"value": module.completed_steps, "unit": "steps"}
    if module.completed_steps:
        metrics |= count_updates(module.optimizer.counters.read())
    watch = module.stopwatch
    if watch.wall_s:
        metrics["train_time"] = {"value": watch.wall_s, "unit": "s"}
        metrics["train_cpu_time"] = {"value": watch.cpu_s, "unit": "s"}
        throughput = len(features) * run.trainer.num_epochs / watch.wall_s
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
        config=run.to_dict()
        | {"digest": run.digest(), "model": job.start.config.to_dict(), "sets": sets, "paper_size": paper_size},
        seed=run.seed,
        metrics=metrics,
        device=device_name(job.on_gpu),
        settings=gpu_settings(job.on_gpu),
        layout=job.layout.sizes | {"threads_per_rank": num_threads},
        steps=[0, module.completed_steps],
        started=time.time() - watch.wall_s,
    )
    losses = training_losses(module.run_dir / "metrics.csv")
    late = losses[len(losses) // 2 :]  # of few examples each
    above = len(losses) > 1 and sum(late) / len(late) > losses[0]
    write_record(found | {"ended_above_start": above}, module.run_dir / RECORD)
    for alarm in (alarm for prediction in module.predictions.values() for alarm in prediction.alarms):
        print(f"WARNING: {alarm}", flush=True)
    print(f"record: {module.run_dir / RECORD}", flush=True)
    if above:
        warn_of_no_progress("training loss", run.optimizer.lr)
