"""What a run writes into its folder and on the terminal, besides its metrics and checkpoints."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ...checkpoint import TOKENIZER_FOLDER, CheckpointError, read_metadata, remove_unfinished, write_atomically
from ...config import ParallelConfig, Recompute, TransformerConfig
from ...config.family import family_of, load
from ...config.pretrain import RunConfig
from ...data.prepare import corpus_unigram_cross_entropy
from ...parallel import ParallelContext
from ...planner.params import count_parameters
from ...results import new_record, write_record
from ..job import PretrainJob
from ..runtime.exit_codes import DIVERGED, INTERRUPTED
from ..runtime.interruption import Interruption
from ..strategy import TensorParallelStrategy
from .diagnosis import count_updates, first_cause
from .metrics_file import MetricsFile
from .reporting import StepReport
from .resuming import CHECKPOINTS, Start

METRICS, RECORD = "metrics.csv", "record.json"


def begin_run_folder(
    job: PretrainJob,
    run_dir: Path,
    start: Start,
    last_step: int,
    metrics: MetricsFile,
    strategy: TensorParallelStrategy,
) -> bool:
    """Announce the run and write the files that precede its first step (on rank 0).

    Returns:
        False if the run has ended before: its files are then left alone.

    Raises:
        CheckpointError: the folder cannot be written, or some rank does not see it; the same on all ranks.
    """
    has_ended = start.step >= last_step and (run_dir / RECORD).is_file()
    problem = None
    if strategy.is_global_zero:
        announce(job, strategy.parallel, run_dir, start, last_step)
        if has_ended:
            print(f"nothing to do: the checkpoint is at step {start.step} and the run ends at {last_step}")
        else:
            problem = prepare_folder(job, run_dir, metrics, start.step)
    problem = strategy.first_error(problem)
    if problem is not None:
        raise CheckpointError(problem)
    if not has_ended:
        strategy.check_shared(run_dir / CHECKPOINTS)
    return not has_ended


def prepare_folder(job: PretrainJob, run_dir: Path, metrics: MetricsFile, start_step: int) -> str | None:
    """Write the files that precede the first step; returns why that fails, or None."""
    try:
        checkpoints = run_dir / CHECKPOINTS
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_unfinished(checkpoints)
        for name, text in ({"config.json": json.dumps(job.run.to_dict(), indent=1)} | job.files).items():
            (run_dir / name).parent.mkdir(exist_ok=True)
            write_atomically(run_dir / name, text.encode())
        # Next to the checkpoints, where conversion and evaluation look for it.
        (checkpoints / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        tokenizer = (Path(job.corpus.folder) / "tokenizer.json").read_bytes()
        write_atomically(checkpoints / TOKENIZER_FOLDER / "tokenizer.json", tokenizer)
        try:
            metrics.resume_at(start_step)
        except (ValueError, LookupError, StopIteration):  # torn by a crash of the machine
            kept = (run_dir / METRICS).rename(run_dir / f"{METRICS}.damaged")
            print(
                f"WARNING: {METRICS} cannot be read; kept as {kept.name}, a new one begins", file=sys.stderr, flush=True
            )
            metrics.resume_at(start_step)
    except OSError as error:
        return f"the run folder {run_dir} cannot be used: {error}"
    return None


def report_failure(
    exit_code: int,
    step: int,
    report: StepReport,
    run_dir: Path,
    strategy: TensorParallelStrategy,
    interruption: Interruption,
) -> None:
    """Print one line about a run that stopped early, after `step`; if it diverged, also write a file."""
    if exit_code == DIVERGED:
        reports = strategy.gather(report.diagnosis)
        path = run_dir / f"not_finite_step_{step}.json"
        message = (
            f"error: no finite gradient in more than {report.run.trainer.max_skipped_steps} steps in a row, up to step "
            f"{step}; first {first_cause(reports)}; see {path}"
        )
        if strategy.is_global_zero:
            path.write_text(json.dumps(reports, indent=1), encoding="utf-8")
            print(message, file=sys.stderr, flush=True)
    if exit_code == INTERRUPTED and strategy.is_global_zero:
        name = interruption.received.name if interruption.received else "a signal to another rank"
        where = run_dir / CHECKPOINTS
        print(f"stopped by {name} after step {step}, saved in {where}; continue with resume=auto", flush=True)


def announce(
    job: PretrainJob,
    context: ParallelContext,
    run_dir: Path,
    start: Start,
    last_step: int,
) -> None:
    """Print the run's model, layout, options, steps and folder in a few lines."""
    run, resume_from, config, layout, batch = job.run, start.checkpoint, job.config, job.layout, job.batch
    parameters = count_parameters(config, layout.tp_size, layout.pad_heads)
    chosen = "; tp_size=auto: the smallest that fits, not the fastest" if run.parallel.tp_size == "auto" else ""
    chosen += describe_idle_gpus(job)
    if run.parallel.record is not None:
        chosen = f"; the fastest of {run.parallel.record}"
    print(
        f"{run.name}: {parameters.total:,} parameters, {parameters.per_rank:,} per rank; {config.num_layers} layers, "
        f"hidden {config.hidden_size}, {config.num_attention_heads} heads, norm order {config.norm_order}\n"
        f"ranks: {layout.world_size} = {layout.dp_size} data x {layout.tp_size} tensor on {job.accelerator}"
        f"{describe_channel(context, job.accelerator)}{chosen}; "
        f"{run.precision.dtype}; batch {run.global_batch_size} = {layout.dp_size} x "
        f"{batch.num_micro_batches} micro-steps x {run.micro_batch_size}; {run.data.seq_length} tokens per sequence\n"
        f"{describe_options(run, config, layout, job.kernels.compiles)}"
        f"kernels: {job.kernels.describe()}, attention by {config.attention} "
        f"({job.compile_choice}, kernels={run.kernels})\n"
        f"{describe_attention_dropout(config)}"
        f"steps {start.step} to {last_step} of {run.trainer.max_steps}"
        + (f", resumed from {resume_from}" if resume_from else "")
        + f"\nrun folder: {run_dir}",
        flush=True,
    )
    then = read_metadata(resume_from).layout if resume_from else {}
    if then and (then["dp_size"], then["tp_size"]) != (layout.dp_size, layout.tp_size):
        print(
            f"layout: changed from the checkpoint's {then['dp_size']} data x {then['tp_size']} tensor to "
            f"{layout.dp_size} data x {layout.tp_size} tensor",
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
    if run.schedule.warmup_steps >= run.trainer.max_steps:
        print(
            f"note: schedule.warmup_steps ({run.schedule.warmup_steps}) is not below trainer.max_steps "
            f"({run.trainer.max_steps}), so the learning rate does not get past its warm-up",
            flush=True,
        )
    if run.resume.path == "auto" and resume_from is None:
        print(f"resume=auto found no complete checkpoint in {run_dir / CHECKPOINTS}: starting from step 0", flush=True)


def describe_channel(context: ParallelContext, accelerator: str) -> str:
    """Describe how tensor ranks on CPUs communicate; empty for one rank or for GPUs."""
    if context.tp_size == 1 or accelerator != "cpu":
        return ""
    return f", communicating through {context.tp_communicator.backend}"


def describe_idle_gpus(job: PretrainJob) -> str:
    """Say how many GPUs of this host `dp_size=auto` uses, if the batch has too few micro-batches for all."""
    layout, sizes = job.layout, job.run.parallel
    if job.accelerator == "cpu" or sizes.dp_size != "auto" or layout.world_size >= torch.cuda.device_count():
        return ""
    whole = job.run.global_batch_size // job.run.micro_batch_size
    return (
        f"; dp_size=auto: {layout.world_size} of {torch.cuda.device_count()} GPUs, because a step has {whole} "
        "micro-batches (a smaller micro_batch_size makes more)"
    )


def describe_attention_dropout(config: TransformerConfig) -> str:
    """Return a line if the loss curve depends on the layout; empty if it does not."""
    if config.attention == "exact" or not config.attention_dropout:
        return ""
    return (
        f"attention dropout {config.attention_dropout:g}: its masks by {config.attention} depend on the layout; with "
        "model.attention=exact the loss curve is the same at any layout\n"
    )


def describe_options(run: RunConfig, config: TransformerConfig, layout: ParallelConfig, compiles: bool = True) -> str:
    """Return a line of the options set besides the layout, and whether they have an effect; empty if none is set."""
    options = [f"fidelity {run.fidelity}"] if run.fidelity != "paper" else []
    if layout.sequence_parallel:
        options.append("sequence parallelism" + ("" if layout.cuts_sequence else " (without effect: tp_size is 1)"))
    if layout.zero1:
        options.append("zero1" + ("" if layout.cuts_optimizer else " (without effect: dp_size is 1)"))
    if layout.batch_halves:
        reason = "tp_size is 1" if layout.tp_size == 1 else "" if compiles else "layers are not compiled"
        options.append("batch halves" + (f" (hides nothing: {reason})" if reason else ""))
    if layout.pad_heads:
        heads, computed = config.num_attention_heads, config.padded_heads(layout.tp_size)
        effect = f"{computed} computed for {heads}" if computed > heads else "without effect: tp_size divides them"
        options.append(f"padded heads ({effect})")
    if config.recompute is not Recompute.NONE:
        options.append(f"recompute {config.recompute.value}")
    if run.optimizer.moments == "bf16":
        options.append("moments in bf16")
    return f"options: {', '.join(options)}\n" if options else ""


def warn_of_costly_validation(run: RunConfig, num_samples: int) -> str:
    """Return a line if validations compute more than a tenth of what the training between them does; otherwise empty.

    A validation has only forward passes, a third of a training step's products.
    """
    between = run.trainer.validate_every_steps
    steps = num_samples / 3 / run.global_batch_size
    if steps <= 0.1 * between or not between:
        return ""
    fewer = max(1, round(0.05 * between * 3 * run.global_batch_size))
    return (
        f"WARNING: a validation, every {between:,} steps, scores {num_samples:,} sequences and takes "
        f"{100 * steps / between:.0f} % of the time of these steps; with trainer.num_validation_samples={fewer} it "
        "takes 5 %\n"
    )


def describe_validation(losses: dict[str, float], start: dict[str, float] | None, terms: dict[str, str]) -> str:
    """The validation loss before and after a run; a sum with each of its terms.

    Args:
        losses, start: after the last step and before the first one, by metric.
        terms: of what each term is a mean, by its name.
    """

    def change(name: str) -> str:
        return (f"{start[name]:.4f} -> " if start else "") + f"{losses[name]:.4f}"

    if len(terms) == 1:
        return f"{change('val/loss')} nats per {next(iter(terms.values()))}"
    parts = [f"{change(f'val/{term}_loss')} per {what}" for term, what in terms.items()]
    return f"{change('val/loss')} nats ({' + '.join(parts)})"


def write_run_record(
    job: PretrainJob,
    steps: tuple[int, int],
    report: StepReport,
    run_dir: Path,
    start: dict[str, float] | None,
    started: float,
    seconds: float,
    num_threads: int,
) -> None:
    """Write the run's JSON record next to its metrics, and print the last lines on the terminal.

    Args:
        steps: the first and last of this start.
        start: losses before the first step; None after a resume.
        started: when this start began, seconds since the epoch.
        seconds: of training alone.
    """
    terms, metrics = load(family_of(job.config.family).loss).TERMS, {}
    units = {f"val/{term}_loss": f"nats/{what}" for term, what in terms.items()}
    # The sum of a mean over masked tokens and a mean over sequences is neither: nats.
    total = "nats" if len(terms) > 1 else next(iter(units.values()))
    units |= {"val/loss": total, "val/perplexity": "perplexity"}
    for name, value in report.validation.items():
        metrics[name] = {"value": value, "unit": units[name]}
    for name, value in (start or {}).items():
        if not name.endswith("perplexity"):
            metrics[name.replace("val/", "val_start/")] = {"value": value, "unit": units[name]}
    unigram = corpus_unigram_cross_entropy(job.corpus)
    metrics["val/unigram_cross_entropy"] = {"value": unigram, "unit": "nats/token"}
    for name, unit in (("train/loss", total), ("tokens_per_s", "tokens/s")):
        if name in report.metrics:  # absent if all steps were done before
            metrics[name] = {"value": report.metrics[name], "unit": unit}
    metrics["train_time"] = {"value": seconds, "unit": "s"}
    metrics["steps"] = {"value": steps[1], "unit": "steps"}
    metrics |= {} if report.counters is None else count_updates(report.counters)
    run_record = new_record(
        name=job.run.name,
        kind="run",
        config=job.run.to_dict() | {"model": job.config.to_dict(), "corpus": job.corpus.manifest},
        seed=job.run.seed,
        metrics=metrics,
        device=job.device_name(),
        settings=job.settings(),
        layout={"tp_size": job.layout.tp_size, "dp_size": job.layout.dp_size, "threads_per_rank": num_threads},
        steps=list(steps),
        started=started,
    )
    write_record(run_record | {"kernels": asdict(job.kernels)}, run_dir / RECORD)
    loss = describe_validation(report.validation, start, terms)
    print(f"validation loss {loss} after {steps[1]} steps; a unigram has {unigram:.4f} per token")
    print(f"record: {run_dir / RECORD}", flush=True)
