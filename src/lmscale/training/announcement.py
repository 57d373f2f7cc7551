"""What a run says before its first step: model, layout, options, and warnings."""

from dataclasses import replace

import torch

from ..config import BatchConfig, Layout, TransformerConfig
from ..config.pretrain import RunConfig
from ..config.validation import describe_excess, describe_time
from ..data.prepare import describe_repetition
from ..parallel import ParallelContext
from ..planner.flops import model_flops_per_step, teacher_flops
from ..planner.memory import GIB, estimate_memory
from ..planner.params import count_parameters
from ..planner.workload import largest_dp_size
from ..results import CHECKPOINTS
from ..runtime.machine import describe_slow_type
from ..runtime.messages import warn
from .run import Run
from .session import RankSession


def announce(run: Run, session: RankSession, num_scored: int) -> None:
    """Print the run's model, layout, options, steps and folder in a few lines.

    Args:
        num_scored: sequences of a validation.
    """
    request, start, config, layout, batch = run.request, run.start, run.model, run.layout, run.batch
    parameters, most = count_parameters(config, layout), "at most " * (layout.pp_size > 1)
    chosen = "; tp_size=auto: the smallest that fits, not the fastest" if request.parallel.tp_size == "auto" else ""
    chosen += describe_idle_gpus(run)
    print(
        f"{request.name}: {parameters.total:,} parameters, {most}{parameters.per_rank:,} per rank; "
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads, "
        f"norm order {config.norm_order}\n"
        f"ranks: {layout.world_size} = {layout} on {run.accelerator}"
        f"{describe_channel(session.strategy.parallel, run.accelerator)}{chosen}; {request.precision.dtype}; "
        f"batch {batch.global_batch_size} = {batch.dp_size} x {batch.num_micro_batches} x {batch.micro_batch_size} "
        f"(data ranks x micro-steps x micro-batch); {request.data.seq_length} tokens per sequence\n"
        f"{describe_stages(config, layout, batch)}{describe_options(request, config, layout, run.kernels.compiles)}"
        f"kernels: {run.kernels.describe()}, attention by {config.attention} "
        f"({run.compile_choice}, kernels={request.kernels})\n"
        f"{describe_teacher(run)}{describe_attention_dropout(config)}{describe_scored(run, num_scored)}"
        f"steps {start.step} to {session.trainer.max_steps} of {request.trainer.max_steps}"
        + (f", resumed from {start.checkpoint.path}" if start.checkpoint else "")
        + f"\nrun folder: {session.folder}",
        flush=True,
    )
    then = Layout(**start.checkpoint.metadata.layout) if start.checkpoint else layout
    if then.sizes != layout.sizes:
        print(f"layout: changed from the checkpoint's {then} to {layout}", flush=True)
    schedule = start.schedule
    if start.resumes:
        cooldown = schedule.cooldown_steps
        print(
            f"schedule: {schedule.decay} ({schedule.formula}) over {schedule.decay_steps} updates, warm-up "
            f"{schedule.warmup_steps}{'' if cooldown is None else f', decay in the last {cooldown}'}, "
            f"lr {start.optimizer.lr:g} to {schedule.min_lr:g}; resume.schedule={request.resume.schedule}",
            flush=True,
        )
        kept = {key: value for key, value in vars(start.optimizer).items() if value != getattr(request.optimizer, key)}
        if kept:
            words = ", ".join(f"optimizer.{key}={value}" for key, value in kept.items())
            print(f"kept from the checkpoint, not as given: {words}", flush=True)
    for note in run.corpus.manifest["notes"]:
        print(f"note: {note}", flush=True)
    if schedule.warmup_steps >= request.trainer.max_steps:
        print(
            f"note: schedule.warmup_steps ({schedule.warmup_steps}) is not below trainer.max_steps "
            f"({request.trainer.max_steps}), so the learning rate does not get past its warm-up",
            flush=True,
        )
    if request.resume.path == "auto" and start.checkpoint is None:
        folder = session.folder / CHECKPOINTS
        print(f"resume=auto found no complete checkpoint in {folder}: starting from step 0", flush=True)


def describe_channel(context: ParallelContext, accelerator: str) -> str:
    """Describe how tensor ranks on CPUs communicate; empty for one rank or for GPUs."""
    if context.tp_size == 1 or accelerator != "cpu":
        return ""
    return f", communicating through {context.tp_communicator.backend}"


def describe_idle_gpus(run: Run) -> str:
    """Say how many GPUs of this host `dp_size=auto` uses, if the batch does not allow more."""
    request, layout = run.request, run.layout
    if not run.on_gpu or request.parallel.dp_size != "auto":
        return ""
    micro_batches, num_gpus = request.global_batch_size // request.micro_batch_size, torch.cuda.device_count()
    possible = num_gpus // (layout.tp_size * layout.pp_size)
    if layout.dp_size >= possible or layout.dp_size != largest_dp_size(micro_batches, possible):
        return ""  # all are used, or another launcher has started fewer ranks
    return (
        f"; dp_size=auto: {layout.world_size} of {num_gpus} GPUs, because it must divide the {micro_batches} "
        "micro-batches of a step"
    )


def describe_stages(config: TransformerConfig, layout: Layout, batch: BatchConfig) -> str:
    """Return a line of the stages of a pipeline and the time for which each is idle; empty if there is one stage."""
    stages, num = layout.pp_size, batch.num_micro_batches
    if stages == 1:
        return ""
    step = f"a step of {num} micro-batch{'es' * (num > 1)}"
    idle = f"each is idle for about {(stages - 1) / (num + stages - 1):.0%} of {step}"
    fewer = "; WARNING: with fewer micro-batches than stages some stages always wait" if num < stages else ""
    return f"pipeline: stages of {config.describe_stages(stages)} layers; {idle}{fewer}\n"


def describe_teacher(run: Run) -> str:
    """Return a line of the teacher and what it costs; empty without one."""
    if run.teacher is None:
        return ""
    settings, workload, sizes = run.request.teacher, run.workload, (run.request.data.seq_length, 1)
    what = f"{workload.top_k} log-probabilities per scored token from {settings.cache}, no FLOPs"
    for config in workload.models[1:]:
        flops = teacher_flops([config], *sizes) / model_flops_per_step(run.model, *sizes)
        what = f"{count_parameters(config).total:,} parameters from {settings.path}, {flops:.0%} more FLOPs per step"
    alone = estimate_memory(replace(workload, teacher=None, top_k=None), run.layout).total
    return (
        f"teacher: {what}, {(run.needed_bytes - alone) / GIB:.2f} GiB more per rank; temperature "
        f"{settings.temperature:g}, weight {settings.weight:g}; train/loss is not comparable to a run without it, "
        "val/loss is\n"
    )


def describe_attention_dropout(config: TransformerConfig) -> str:
    """Return a line if the loss curve depends on the layout; empty if it does not."""
    if config.attention == "exact" or not config.attention_dropout:
        return ""
    return (
        f"attention dropout {config.attention_dropout:g}: its masks by {config.attention} depend on the layout; with "
        "model.attention=exact the loss curve is the same at any layout\n"
    )


def describe_options(run: RunConfig, config: TransformerConfig, layout: Layout, compiles: bool = True) -> str:
    """Return a line of the options set besides the layout, and whether they have an effect; empty if none is set."""
    options = [f"fidelity {run.fidelity}"] if run.fidelity != "paper" else []
    if config.parametrization != "standard":
        depth = f" and {config.scaling.depth:g} x the depth" if config.scaling.scales_depth else ""
        options.append(f"{config.parametrization} ({config.scaling.width:g} x the width{depth} of its base)")
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
    if config.recompute != "none":
        options.append(f"recompute {config.recompute}")
    if run.optimizer.moments == "bf16":
        options.append("moments in bf16")
    return f"options: {', '.join(options)}\n" if options else ""


def warn_of_cost(run: Run, num_scored: int) -> None:
    """Warn of a half type that the CPU has no instructions for, of long validations, and of a small corpus.

    A run on a GPU whose validations take more than `max_validation_share` was refused.

    Args:
        num_scored: sequences of a validation.
    """
    request, trainer = run.request, run.request.trainer
    if not run.on_gpu:
        warn(describe_slow_type(request.precision.dtype))
    if trainer.validate_every_steps:
        warn(describe_excess(trainer, num_scored, request.global_batch_size))
    warn(describe_repetition(run.corpus, trainer.max_steps * request.global_batch_size * request.data.seq_length))


def describe_scored(run: Run, num_scored: int) -> str:
    """Return a line of how many sequences `num_validation_samples=auto` scores; empty if a number was requested."""
    trainer = run.request.trainer
    if trainer.num_validation_samples != "auto":
        return ""
    part = "of all sequences" if run.num_validation_samples is None else "not of all sequences"
    time = describe_time(trainer, num_scored, run.request.global_batch_size)
    return f"validation by trainer.num_validation_samples=auto, {part}: {time}\n"
