"""From `conf/plan.yaml` to its answer: the job, the plan of one layout, or a ranking of all layouts."""

import dataclasses

from ..config import RECOMPUTE_MODES, Layout, TransformerConfig
from ..config.checks import require
from ..config.from_dict import keys_of
from ..config.layout import ParallelConfig
from ..config.plan import PlanConfig
from ..config.validation import describe_time, most_samples
from .memory import first_that_fits
from .plan import Plan, describe_padding, describe_shortage, describe_stages
from .search import (
    Ranking,
    describe_host,
    describe_limits,
    describe_slower_kernels,
    divides,
    largest_number,
    nearest,
    rank_layouts,
    rank_on_machine,
    suggest_layout,
)
from .workload import STAND_IN_VOCAB_SIZE, Workload, divisors, layout_at, model_sizes, no_size_fits, stage_numbers

_HALF = ("bf16", "fp16")


def make_job(question: PlanConfig) -> tuple[Workload, list[str]]:
    """The job to plan, and notes on assumed values; `model.recompute=auto` starts from none.

    Raises:
        ValueError: the devices do not have the type, or no layout of the model has sizes for float8.
    """
    notes, cluster = [], question.cluster
    if question.model.vocab_size is None:
        notes.append(f"model.vocab_size is the tokenizer's: planned with {STAND_IN_VOCAB_SIZE:,} ids")
    job = Workload.of(question, compiles=cluster.is_gpu, on_gpu=cluster.is_gpu)  # as `compile=auto` decides
    dtype = job.dtype
    if dtype in _HALF and dtype not in cluster.dtypes:
        other = next((half for half in _HALF if half in cluster.dtypes), dtype)  # as many bytes
        if other != dtype:
            notes.append(f"{cluster.device} has no {dtype}: planned with precision={other}")
        dtype = other
    cluster.peak_flops_per_s(dtype)
    if dtype == "fp8":  # what one device refuses, every layout does
        with keys_of(TransformerConfig, "model."):
            job.config.check_float8(tp_size=1)
    teacher = question.teacher.model and question.teacher.model.resolve(job.config.vocab_size)
    return dataclasses.replace(job, dtype=dtype, teacher=teacher, top_k=question.teacher.top_k), notes


def describe_validation_cost(question: PlanConfig) -> str:
    """Describe what each validation of the run costs; of a corpus that is not known, the most that a run may score."""
    trainer, wanted = question.trainer, question.trainer.num_validation_samples
    most = most_samples(trainer, question.global_batch_size)
    limits = {"auto": "auto is at most this", None: "null is refused on a GPU where the corpus has more than this"}
    number = most if wanted in limits else wanted
    time = describe_time(trainer, number, question.global_batch_size)
    return f"trainer.num_validation_samples={limits.get(wanted, wanted)}: {time}"


def plan_layout(question: PlanConfig) -> tuple[Plan, list[str]]:
    """The plan of the requested layout, with notes.

    Raises:
        ValueError: the layout is impossible, does not fit, or leaves some of `num_devices` unused; names the nearest
            one that works.
    """
    job, notes = make_job(question)
    cluster, layout = question.machine, _resolve_layout(question, job)
    with keys_of(TransformerConfig, "model."), keys_of(ParallelConfig, "parallel."):
        job.config.check_stages(layout.pp_size)
    _check_all_are_used(question, layout)
    if question.parallel.dp_size == "auto" and question.num_devices is None and layout.dp_size > 1:
        notes.append(
            f"num_devices is not given: planned on {layout.world_size:,}, the most that the batch "
            f"({job.global_batch_size:,} in micro-batches of {job.micro_batch_size}) and {cluster.name} "
            f"({cluster.num_devices:,} devices) allow"
        )
    try:
        with keys_of(TransformerConfig, "model."), keys_of(ParallelConfig, "parallel."):
            plan = Plan(job, layout, cluster)
    except ValueError as error:
        raise ValueError(f"{error}; {suggest_layout(job, layout, cluster)}") from None
    notes += describe_padding(plan) + describe_stages(plan)
    found = first_that_fits([(each, layout) for each in _jobs_to_try(question, job)], cluster.usable_bytes)
    if found is None:
        raise ValueError(
            f"the memory a rank needs must be at most what its device has, but with {plan.overrides} "
            f"{describe_shortage(plan)}; {suggest_layout(job, layout, cluster)}"
        )
    fitting = Plan(*found[:2], cluster)
    if fitting.recompute != plan.recompute:
        notes.append(
            f"with model.recompute={plan.recompute} {describe_shortage(plan)}: "
            f"planned with model.recompute={fitting.recompute}"
        )
    return fitting, notes + describe_host(fitting)


def rank(question: PlanConfig) -> tuple[Ranking, list[str]]:
    """All layouts of the job, with and without each option that can help, with notes.

    Sizes and options of `parallel` that are typed hold for all.

    Raises:
        ValueError: none fits; names the nearest one that does.
    """
    job, notes = make_job(question)
    given = question.parallel.pp_size
    any_number = given in (None, "auto")
    options = question.parallel.layout(tp_size=1, pp_size=1 if any_number else given, dp_size=1)
    with keys_of(TransformerConfig, "model."), keys_of(ParallelConfig, "parallel."):
        job.config.check_stages(options.pp_size)
    num_devices = question.num_devices or largest_number(job, question.cluster, options)
    numbers = stage_numbers(job) if any_number else [given]
    fixed = question.fixed_layout
    ranking = rank_layouts(job, question.cluster, num_devices, options, numbers, fixed)
    if not ranking.fitting:
        closest = min(ranking.too_large, key=lambda plan: plan.missing_bytes)
        wanted = dataclasses.replace(options, dp_size=num_devices)
        way_out = suggest_layout(job.change(micro_batch_size=1), wanted, question.cluster)
        raise ValueError(
            f"`num_devices` must be a number of devices on which some layout fits, but on {num_devices:,} even "
            f"{closest.overrides} does not: {describe_shortage(closest)}; {way_out}"
        )
    best = ranking.fitting[0]
    notes += describe_padding(best) + describe_stages(best) + describe_host(best) + describe_slower_kernels(ranking)
    if not fixed.keys() & {"tp_size", "dp_size"}:
        notes += describe_limits(best, options, fixed)
    return ranking, notes


def plans_of_machine(question: PlanConfig, num_devices: int) -> list[Plan]:
    """The best `measure` layouts of a machine with `num_devices` devices, fastest first; see `rank_on_machine`.

    Raises:
        ValueError: none divides model and batch, or of those none fits; more `num_devices` are requested than exist.
    """
    job, _ = make_job(question)
    rule = f"at most the {num_devices} of this machine with `measure`"
    require(question, "num_devices", rule, (question.num_devices or 0) <= num_devices)
    used, is_free = question.num_devices or num_devices, question.model.recompute == "auto" and question.cluster.is_gpu
    jobs = job.in_each_mode() if is_free else [job]
    plans = rank_on_machine(jobs, question.cluster, used, question.parallel.layout(tp_size=1, pp_size=1, dp_size=1))
    if not plans:
        raise ValueError(
            f"`measure` needs a layout of {used} devices that divides the model and the batch "
            f"(`micro_batch_size` {job.micro_batch_size}, `global_batch_size` {job.global_batch_size}), "
            "but there is none; best=true ranks other micro-batches"
        )
    fitting = [plan for plan in plans if plan.missing_bytes <= 0]
    if not fitting:
        closest = min(plans, key=lambda plan: plan.missing_bytes)
        raise ValueError(
            f"`measure` needs a layout of {used} devices that fits, but even with {closest.overrides} "
            f"{describe_shortage(closest)}"
        )
    return fitting[: question.measure]


def _jobs_to_try(question: PlanConfig, job: Workload) -> list[Workload]:
    """The job as requested, then in the modes that recompute more if the planner may choose them."""
    first = RECOMPUTE_MODES.index(job.config.recompute)
    return job.in_each_mode()[first:] if question.find_recompute else [job]


def _resolve_layout(question: PlanConfig, job: Workload) -> Layout:
    """The requested layout, with `auto` resolved."""
    request, machine = question.parallel, question.machine
    if "auto" not in (request.tp_size, request.num_stages):
        return layout_at(job, request, request.tp_size, request.num_stages, machine.num_devices)
    sizes = model_sizes(job, request.tp_size, request.num_stages, request.pad_heads, machine.num_devices)
    layouts = [layout_at(job, request, *size, machine.num_devices) for size in sizes]
    layouts = [each for each in layouts if divides(job, each) and each.world_size <= machine.num_devices]
    candidates = [(each, layout) for each in _jobs_to_try(question, job) for layout in layouts]
    found = first_that_fits(candidates, machine.usable_bytes)
    if found is None:
        near = suggest_layout(job, layout_at(job, request, 1, 1, machine.num_devices), machine)
        raise no_size_fits(request, f"that divides the model suits the batch and fits; {near}")
    return found[1]


def _check_all_are_used(question: PlanConfig, layout: Layout) -> None:
    """Refuse a given number of devices that the layout cannot use; a given `dp_size` says how many it is to use."""
    if question.num_devices in (None, layout.world_size) or question.parallel.dp_size != "auto":
        return
    whole = question.global_batch_size // question.micro_batch_size
    size = layout.tp_size * layout.pp_size
    stages = f" times `parallel.pp_size` ({layout.pp_size})" if layout.pp_size > 1 else ""
    usable = [size * dp for dp in divisors(whole, question.cluster.num_devices // size)]
    near = " and ".join(f"{number:,}" for number in nearest(question.num_devices, usable)) or "none"
    raise ValueError(
        f"`num_devices` must be `parallel.tp_size` ({layout.tp_size}){stages} times a `parallel.dp_size` that divides "
        f"the {whole:,} micro-batches of a step, but is {question.num_devices:,}; such numbers near it: "
        f"{near}; best=true ranks the layouts that use all devices"
    )
