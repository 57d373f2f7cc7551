"""What a run writes into its folder, besides its metrics and checkpoints, and how it reports a failure."""

import csv
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..checkpoint import TOKENIZER_FOLDER, remove_unfinished
from ..config.family import load
from ..data.prepare import corpus_unigram_cross_entropy
from ..results import CHECKPOINTS, METRICS, RECORD, new_record, write_record
from ..runtime.accelerator import gpu_settings
from ..runtime.exit_codes import DIVERGED, INTERRUPTED
from ..runtime.machine import device_name
from ..runtime.messages import print_error, warn
from ..runtime.run_lock import run_folder_errors
from ..shared_files import write_atomically
from .announcement import announce
from .callbacks.step_report import StepReport
from .device_memory import memory_metrics
from .diagnosis import count_updates, first_cause
from .loggers import MetricsFile, keep_damaged, training_losses
from .run import Run
from .session import RankSession


def begin_run_folder(run: Run, session: RankSession, metrics: MetricsFile, num_scored: int) -> bool:
    """Announce the run and write the files that precede its first step, or say that there is none (on rank 0).

    Args:
        num_scored: sequences of a validation.

    Returns:
        False if the run has ended before: its files are then left alone.

    Raises:
        AgreedError: the folder cannot be written, or some rank does not see it.

    Communicates:
        from rank 0 whether there is a record, which others may not see yet over NFS; then small objects.
    """
    run_dir, ranks, last_step = session.folder, session.strategy.ranks, session.trainer.max_steps
    if ranks.broadcast(run.start.step >= last_step and (run_dir / RECORD).is_file()):
        if session.is_first:
            print(f"nothing to do: the checkpoint is at step {run.start.step} and the run ends at {last_step}")
        return False
    if session.is_first:
        announce(run, session, num_scored)
    ranks.agree(partial(prepare_folder, run, run_dir, metrics), first_rank_only=True)
    ranks.check_shared(run_dir / CHECKPOINTS)
    return True


def prepare_folder(run: Run, run_dir: Path, metrics: MetricsFile) -> None:
    """Write the files that precede the first step.

    Raises:
        ValueError: the folder cannot be written.
    """
    with run_folder_errors(run_dir):
        tokenizer = (Path(run.corpus.folder) / "tokenizer.json").read_bytes()
        write_first_files(run_dir, {"config.json": json.dumps(run.describe(), indent=1)} | run.files, tokenizer)
        try:
            metrics.resume_at(run.start.step)
        except (ValueError, LookupError, csv.Error):  # torn by a crash of the machine
            keep_damaged(run_dir / METRICS)
            metrics.resume_at(run.start.step)
        (run_dir / RECORD).unlink(missing_ok=True)  # of a part of this run, which goes on


def write_first_files(run_dir: Path, files: dict[str, str], tokenizer: bytes) -> None:
    """Write files by path, and the tokenizer next to the checkpoints, where conversion and evaluation look for it."""
    checkpoints = run_dir / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_unfinished(checkpoints)
    data = {run_dir / name: text.encode() for name, text in files.items()}
    for path, content in (data | {checkpoints / TOKENIZER_FOLDER / "tokenizer.json": tokenizer}).items():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, content)


def report_failure(session: RankSession, step: int, report: StepReport) -> None:
    """Print one line about a run that stopped early, after `step`; if it diverged, also write a file.

    Raises:
        AgreedError: the file cannot be written.
    """
    if session.ending.exit_code == DIVERGED:
        reports = session.strategy.ranks.gather(report.diagnosis)
        path = session.folder / f"not_finite_step_{step}.json"
        if session.is_first:
            print_error(
                f"no finite gradient in more steps in a row than trainer.max_skipped_steps "
                f"({report.request.trainer.max_skipped_steps}), up to step {step}; "
                f"first {first_cause(reports, session.strategy.optimizers[0].all_names)}; see {path}"
            )
        write = partial(path.write_text, json.dumps(reports, indent=1), encoding="utf-8")
        session.strategy.ranks.agree(write, first_rank_only=True)  # all ranks must learn of a full disk
    if session.ending.exit_code == INTERRUPTED and session.is_first:
        received, where = session.interruption.received, session.folder / CHECKPOINTS
        name = received.name if received else "a signal to another rank"
        print(f"stopped by {name} after step {step}, saved in {where}; continue with resume=auto", flush=True)


def describe_validation(losses: dict[str, float], start: dict[str, float], terms: dict[str, str]) -> str:
    """The validation loss before and after a run; a sum with each of its terms.

    Args:
        losses, start: after the last step and before the first one (empty after a resume), by metric.
        terms: of what each term is a mean, by its name.
    """

    def change(name: str) -> str:
        return (f"{start[name]:.4f} -> " if start else "") + f"{losses[name]:.4f}"

    if len(terms) == 1:
        return f"{change('val/loss')} nats per {next(iter(terms.values()))}"
    parts = [f"{change(f'val/{term}_loss')} per {what}" for term, what in terms.items()]
    return f"{change('val/loss')} nats ({' + '.join(parts)})"


def write_run_record(run: Run, session: RankSession, report: StepReport) -> None:
    """Write the run's JSON record next to its metrics, and print the last lines on the terminal."""
    terms, metrics, step = load(run.model.traits.loss).TERMS, {}, report.validated_at
    units = {f"val/{term}_loss": f"nats/{what}" for term, what in terms.items()}
    # The sum of a mean over masked tokens and a mean over sequences is neither: nats.
    total = "nats" if len(terms) > 1 else next(iter(units.values()))
    units |= {"val/loss": total, "val/perplexity": "perplexity"}
    for name, value in report.validation.items():
        metrics[name] = {"value": value, "unit": units[name]}
    for name, value in report.validation_at_start.items():
        if not name.endswith("perplexity"):
            metrics[name.replace("val/", "val_start/")] = {"value": value, "unit": units[name]}
    metrics["val/num_sequences"] = {"value": len(session.trainer.datamodule.samples.scored), "unit": "sequences"}
    unigram = corpus_unigram_cross_entropy(run.corpus)
    metrics["val/unigram_cross_entropy"] = {"value": unigram, "unit": "nats/token"}
    for name, unit in (("train/loss", total), ("tokens_per_s", "tokens/s")):
        if name in report.metrics:  # absent if all steps were done before
            metrics[name] = {"value": report.metrics[name], "unit": unit}
    metrics["train_time"] = {"value": report.train_time_s, "unit": "s"}
    metrics["steps"] = {"value": step, "unit": "steps"}
    metrics |= memory_metrics(run.needed_bytes) if run.on_gpu else {}
    metrics |= {} if report.counters is None else count_updates(report.counters)
    run_record = new_record(
        name=run.request.name,
        kind="run",
        config=run.describe() | {"model": run.model.to_dict(), "corpus": run.corpus.manifest},
        seed=run.request.seed,
        metrics=metrics,
        device=device_name(run.on_gpu),
        settings=gpu_settings(run.on_gpu),
        layout=run.layout.sizes | {"threads_per_rank": session.num_threads},
        steps=[run.start.step, step],
        started=session.started,
    )
    # A resumed run has its first training loss alone, which is lower with a teacher and then not compared.
    end, first = report.validation["val/loss"], [] if run.teacher else training_losses(session.folder / METRICS)[:1]
    above = not math.isfinite(end) or end > report.validation_at_start.get("val/loss", next(iter(first), end))
    more = {"kernels": asdict(run.kernels), "ended_above_start": above}
    write_record(run_record | more, session.folder / RECORD)
    loss = describe_validation(report.validation, report.validation_at_start, terms)
    unigram_loss = f"a unigram has {unigram:.4f} per token of all validation text"
    print(f"validation loss {loss} at step {step}; {unigram_loss}")
    print(f"record: {session.folder / RECORD}", flush=True)
    if not math.isfinite(end):
        warn("the validation loss is not finite: the run has diverged")
    elif above:
        warn_of_no_progress("validation loss", run.request.optimizer.lr)


def warn_of_no_progress(loss: str, lr: float) -> None:
    """Say that a training ended with a higher loss than it began with."""
    warn(f"the {loss} ended above its start, so nothing useful was learned; try a lower optimizer.lr than {lr:g}")
