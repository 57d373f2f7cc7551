"""What a finetuning writes into its run folder and on the terminal, besides its metrics and checkpoint."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from ..config import TransformerConfig
from ..config.finetune import FinetuneConfig
from ..paper import BERT_SIZES
from ..results import METRICS, RECORD, new_record, write_record
from ..runtime.accelerator import gpu_settings
from ..runtime.machine import device_name
from ..runtime.run_lock import run_folder_errors
from ..training.announcement import describe_channel
from ..training.diagnosis import count_updates
from ..training.loggers import training_losses
from ..training.run_folder import warn_of_no_progress, write_first_files
from ..training.session import RankSession
from .callbacks import Scoring, StepReport
from .features import Features
from .glue import DEV_ROWS
from .outputs import write_outputs
from .preparing import FinetuneJob
from .scoring import with_units

# Number of examples of the published sets of Table 5.
SCORED = {
    **{task: DEV_ROWS[task] for task in ("mnli", "qqp")},
    "squad_v1": {"dev": 10_570},
    "squad_v2": {"dev": 11_873},
    "race": {"test": 4_934},
}
# Number of examples of the published training sets; some copies of QQP lack unreadable rows.
TRAINED = {"mnli": 392_702, "qqp": 363_846, "squad_v1": 87_599, "squad_v2": 130_319, "race": 87_866}
_MISSING = 0.001  # fraction of them that may be missing


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


def announce(job: FinetuneJob, session: RankSession, features: Features | None, sets: dict[str, Features]) -> None:
    """Print the task, its data, the layout and the run folder.

    Args:
        features: of the training set; None if nothing is trained.
        sets: features to score, by name.
    """
    run, layout = job.run, job.layout
    work = f"{len(features):,} items x {run.trainer.num_epochs} epochs" if features is not None else "nothing"
    print(
        f"{run.name}: {run.task.name} from {job.start.path}{' (sizes only)' if run.from_scratch else ''}; trains on "
        f"{work}, batch {run.global_batch_size}, lr {run.optimizer.lr:g}; scores "
        + ", ".join(f"{name} ({len(found.ids):,})" for name, found in sets.items())
        + f"\nranks: {layout.dp_size} data x {layout.tp_size} tensor on {job.accelerator}"
        f"{describe_channel(session.strategy.parallel, job.accelerator)}, {run.precision.dtype}; run folder: "
        f"{session.folder}",
        flush=True,
    )
    used = [*([features] if features is not None else []), *sets.values()]
    for note in dict.fromkeys(note for found in used for note in found.notes):  # a file may be used twice
        print(f"note: {note}", flush=True)


def write_results(
    job: FinetuneJob, session: RankSession, features: Features | None, report: StepReport, scoring: Scoring
) -> None:
    """Write the predictions and the run's JSON record, and print the last line on the terminal.

    Args:
        features: of the training set; None if nothing is trained.
    """
    run, folder, step = job.run, session.folder, scoring.scored_at
    scoring.lines.finalize()
    write_outputs(folder / "predictions", run.task, scoring.sets, scoring.predictions, scoring.logits)
    metrics = with_units(scoring.metrics)
    metrics["steps"] = {"value": step, "unit": "steps"}
    sets = {
        name: {"examples": len(f.ids), "items": len(f), "notes": f.notes, "alarms": scoring.predictions[name].alarms}
        for name, f in scoring.sets.items()
    }
    if features is not None:
        metrics |= count_updates(report.counters)
        metrics["train_time"] = {"value": report.wall_s, "unit": "s"}
        metrics["train_cpu_time"] = {"value": report.cpu_s, "unit": "s"}
        throughput = len(features) * run.trainer.num_epochs / report.wall_s
        metrics["items_per_s"] = {"value": throughput, "unit": "items/s"}
        sets["train"] = {"examples": len(features.ids), "items": len(features), "notes": features.notes}
    num_scored = {name: len(f.ids) for name, f in scoring.sets.items()}
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
        layout=job.layout.sizes | {"threads_per_rank": session.num_threads},
        steps=[0, step],
        started=session.started,
    )
    losses = training_losses(folder / METRICS)
    late = losses[len(losses) // 2 :]  # of few examples each
    above = len(losses) > 1 and sum(late) / len(late) > losses[0]
    write_record(found | {"ended_above_start": above}, folder / RECORD)
    print(f"record: {folder / RECORD}", flush=True)
    if above:
        warn_of_no_progress("training loss", run.optimizer.lr)


def record_kind(
    run: FinetuneConfig, model: TransformerConfig, num_examples: Mapping[str, int], num_trained: int | None
) -> tuple[str, str | None]:
    """Return the kind of a run's record, and the paper's name of the model's size.

    Args:
        num_examples: scored examples by set.
        num_trained: examples of the training set; None if a finetuned checkpoint is only scored, whose own record
            describes its training.

    Returns:
        `run` if size, norm order and parametrization are those of Table 4 and the sets are the complete sets of Table
        5, otherwise `scaled_down`; and the name of the size, None if the paper has none.
    """
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads)
    size = next((name for name, paper in BERT_SIZES.items() if paper == shape), None)
    if run.task.name not in SCORED:
        return "scaled_down", size
    whole = all(num_examples.get(name) == count for name, count in SCORED[run.task.name].items())
    trimmed = run.from_scratch or run.trainer.max_train_examples is not None
    trimmed |= num_trained is not None and num_trained < (1 - _MISSING) * TRAINED[run.task.name]
    as_in_paper = (model.norm_order, model.parametrization) == ("pre", "standard")
    is_run = size is not None and as_in_paper and whole and not trimmed
    return "run" if is_run else "scaled_down", size
