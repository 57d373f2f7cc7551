"""Search the layouts of a job on a cluster: all possible ones ranked by step time, and the nearest that works.

A candidate is a job, with its micro-batch and recomputation mode, in a layout. `options` is a layout whose options and
number of stages hold for all that are searched; its other sizes do not matter.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..config import RECOMPUTE_MODES, Layout
from ..config.cluster import Cluster
from .memory import GIB, Candidate, estimate_memory, first_that_fits
from .plan import Plan
from .step_time import crosses_nodes
from .workload import Workload, divisors, tensor_sizes, with_other_stages

LARGEST_MICRO_BATCH = 64
_RESTRICTING_OPTIONS = ("batch_halves", "sequence_parallel")  # not every batch and not every sequence can be cut


@dataclass(frozen=True)
class Ranking:
    """Layouts of a job that use all of a number of devices.

    Args:
        fitting: plans whose ranks fit their devices, fastest first.
        too_large: for each `tp_size` at which nothing fits, the plan that lacks least memory.
    """

    fitting: tuple[Plan, ...]
    too_large: tuple[Plan, ...]


def _grids(job: Workload, options: Layout, num_devices: int) -> list[Layout]:
    """Every layout of all `num_devices` that divides the model."""
    sizes = tensor_sizes(job, options.pad_heads, num_devices)
    models = [dataclasses.replace(options, tp_size=p, dp_size=1) for p in sizes]
    divisible = [layout for layout in models if num_devices % layout.world_size == 0]
    return [dataclasses.replace(layout, dp_size=num_devices // layout.world_size) for layout in divisible]


def _possible_layouts(job: Workload, options: Layout, largest: int) -> list[Layout]:
    """Every layout of at most `largest` devices that divides the model and, with some micro-batch, the batch."""
    grids = [
        dataclasses.replace(options, tp_size=p, dp_size=d)
        for p in tensor_sizes(job, options.pad_heads, largest)
        for d in divisors(job.global_batch_size, largest // (p * options.pp_size))
    ]
    return [layout for layout in grids if micro_batch_sizes(job, layout)]


def divides(job: Workload, layout: Layout) -> bool:
    """Whether a layout divides the model and the batch."""
    try:
        job.check_layout(layout)
    except ValueError:
        return False
    return True


def micro_batch_sizes(job: Workload, layout: Layout) -> list[int]:
    """Powers of two that divide a data rank's share of the batch, and the share itself if it is small; ascending.

    With `batch_halves` only even ones; none if the layout does not divide the batch or, where it cuts it, the sequence.
    """
    share = job.global_batch_size // layout.dp_size
    return [
        b
        for b in divisors(share, LARGEST_MICRO_BATCH)
        if (b.bit_count() == 1 or b == share) and divides(job.change(b), layout)
    ]


def _candidates(job: Workload, layouts: Iterable[Layout]) -> list[Candidate]:
    """Every micro-batch size and recomputation mode in each layout."""
    modes = job.in_each_mode()
    return [(each.change(b), layout) for layout in layouts for b in micro_batch_sizes(job, layout) for each in modes]


def rank_layouts(
    job: Workload,
    cluster: Cluster,
    num_devices: int,
    options: Layout,
    numbers: Sequence[int] = (),
    fixed: Mapping[str, int | bool] = MappingProxyType({}),
) -> Ranking:
    """Plan every tp x pp x dp on `num_devices`, micro-batch and recomputation mode.

    Every layout is planned also with `sequence_parallel`, `zero1` and, on GPUs, where layers are compiled,
    `batch_halves`, alone and together. With `sequence_parallel` a `tp_size` that does not divide the sequence is left
    out, and with `batch_halves` an odd micro-batch on several tensor ranks. What is too large is named for the fewest
    stages.

    Args:
        numbers: of stages, ascending; none: that of `options`.
        fixed: sizes and options that every layout has.

    Raises:
        ValueError: no grid of `num_devices` divides model and batch; names the next numbers that do.
    """
    numbers = numbers or [options.pp_size]
    fitting, too_large = [], None
    for stages in numbers:
        fits, lacking = _plan_all(job, cluster, num_devices, dataclasses.replace(options, pp_size=stages), fixed)
        fitting += fits
        if too_large is None and (fits or lacking):
            too_large = lacking
    if too_large is None and fixed:
        words = " ".join(f"parallel.{name}={str(value).lower()}" for name, value in fixed.items())
        raise ValueError(f"`num_devices` must be one that a layout with {words} can use, but is {num_devices:,}")
    if too_large is None:
        raise ValueError(_impossible_number(job, cluster, num_devices, options, numbers))
    return Ranking(tuple(sorted(_without_slower_stages(fitting), key=_speed)), tuple(too_large))


def _plan_all(
    job: Workload, cluster: Cluster, num_devices: int, options: Layout, fixed: Mapping[str, int | bool]
) -> tuple[list[Plan], list[Plan]]:
    """The plans that fit, and the `too_large` of a `Ranking`."""
    fitting, too_large = [], []
    for grid in _grids(job, options, num_devices):
        layouts = [each for each in _with_options(grid, cluster) if fixed.items() <= vars(each).items()]
        plans = [Plan(*each, cluster) for each in _candidates(job, layouts)]
        fits = [plan for plan in plans if plan.missing_bytes <= 0]
        fitting += fits
        if plans and not fits:
            too_large.append(min(plans, key=lambda plan: plan.missing_bytes))
    return fitting, too_large


def _impossible_number(
    job: Workload, cluster: Cluster, num_devices: int, options: Layout, numbers: Sequence[int]
) -> str:
    """Why no grid of `num_devices` with any of these numbers of stages divides model and batch, for a message."""
    near = []
    for stages in numbers:  # the fewest first
        near = near or _alternatives(job, cluster, num_devices, dataclasses.replace(options, pp_size=stages))
    *first, last = map(str, numbers)
    sequence = " and the sequence" * options.sequence_parallel
    stages = f" times a `pp_size` of {' or '.join([', '.join(first), last] if first else [last])}"
    even = " (into even shares if `tp_size` is above 1)" * options.batch_halves
    way_out = f"a layout fits with {', '.join(each for each, *_ in near)}"
    return (
        f"`num_devices` must be a `tp_size` that divides the model{sequence}{stages * (last != '1')} times a `dp_size` "
        f"that divides the batch of {job.global_batch_size:,}{even}, but is {num_devices:,}; "
        f"{way_out if near else 'no layout fits on another number either'}"
    )


def _without_slower_stages(plans: Iterable[Plan]) -> list[Plan]:
    """Plans without those of several stages whose layout also fits with less recomputation, which is faster.

    Args:
        plans: those of a layout and a micro-batch in the order of the modes.
    """
    seen, kept = set(), []
    for plan in plans:
        same = plan.layout, plan.job.micro_batch_size
        if plan.layout.pp_size == 1 or same not in seen:
            kept.append(plan)
        seen.add(same)
    return kept


def _speed(plan: Plan) -> tuple[float, float]:
    """Sorts by step time, and what is equally fast, because the host binds, by the time of the device."""
    return _rounded(plan.time.total), plan.time.total - plan.time.host


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.12g}")  # sums in another order are equal


def _with_options(layout: Layout, cluster: Cluster, cuts_sequence: bool = True) -> list[Layout]:
    """The layout and those with each choice of further options, where these have an effect.

    Args:
        cuts_sequence: also with `sequence_parallel`.
    """
    layouts, shares = [layout], layout.tp_size > 1
    has_effect = {"zero1": layout.dp_size > 1, "batch_halves": shares and cluster.is_gpu}
    for name, is_useful in (has_effect | {"sequence_parallel": shares and cuts_sequence}).items():
        if is_useful and not getattr(layout, name):
            layouts += [dataclasses.replace(each, **{name: True}) for each in layouts]
    return layouts


def rank_on_machine(jobs: Sequence[Workload], cluster: Cluster, num_devices: int, options: Layout) -> list[Plan]:
    """Plan a job, with the micro-batch that it has, in every layout of one machine, fastest first.

    Each layout without and with `zero1`, and on GPUs, where layers are compiled, `batch_halves`. On CPUs a layout may
    have fewer ranks than there are cores: each has an equal share of the cores, and is modelled as if its threads
    divided all work without loss. So two cores have four layouts: one rank of two threads, two tensor ranks, and two
    data ranks without and with `zero1`.

    Args:
        jobs: the job in each recomputation mode to try; each layout has the first with which it fits, or the last.
        num_devices: GPUs or cores of the machine, all used.
    """
    plans = []
    for num_ranks in [num_devices] if cluster.is_gpu else divisors(num_devices, num_devices):
        device = _join_devices(cluster, num_devices // num_ranks, num_ranks)
        grids = _grids(jobs[0], options, num_ranks)
        for layout in (each for grid in grids for each in _with_options(grid, cluster, cuts_sequence=False)):
            if divides(jobs[0], layout):
                tried = [(job, layout) for job in jobs]
                plans.append(Plan(*(first_that_fits(tried, device.usable_bytes) or tried[-1])[:2], device))
    return sorted(plans, key=_speed)


def _join_devices(cluster: Cluster, num_joined: int, num_devices: int) -> Cluster:
    """The cluster with `num_joined` of its devices taken as one, and `num_devices` of these."""
    rates = ("product_tflops", "copy_gb_s", "attention_forward_tflops", "attention_backward_tflops")
    roofline = cluster.roofline
    roofline = dataclasses.replace(roofline, **{name: num_joined * getattr(roofline, name) for name in rates})
    memory_gib = num_joined * cluster.memory_gib
    return dataclasses.replace(cluster, num_devices=num_devices, memory_gib=memory_gib, roofline=roofline)


def with_busy_device(plan: Plan, most: float = 1.0) -> Plan | None:
    """The plan with a larger micro-batch: the first of 2, 4, 8, ... times it at which the host's time is at most `most`
    of the device's. The batch is rounded up to whole micro-batches. None: memory does not allow one.
    """
    size, share = plan.job.micro_batch_size, -(-plan.job.global_batch_size // plan.layout.dp_size)
    while plan.missing_bytes <= 0:
        size *= 2
        batch = plan.layout.dp_size * size * -(-share // size)
        plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job.change(size), global_batch_size=batch))
        if plan.time.host_share <= most and plan.missing_bytes <= 0:
            return plan
    return None


def describe_host(plan: Plan) -> list[str]:
    """Describe a step for which the device waits for its host, and the micro-batch that ends it; nothing otherwise."""
    time = plan.time
    if not time.host:
        return []
    better = with_busy_device(plan)
    way_out = "no larger micro-batch fits"
    if better is not None:
        batch = better.job.global_batch_size
        larger = f" global_batch_size={batch}" * (batch != plan.job.global_batch_size)
        way_out = f"it is not with micro_batch_size={better.job.micro_batch_size}{larger}"
    host, device = time.host + time.host_hidden, time.total - time.host
    words = f"the host takes {host * 1e3:,.0f} ms to launch a step that takes the device {device * 1e3:,.0f} ms"
    return [f"host-bound: {words}; {way_out}"]


def describe_slower_kernels(ranking: Ranking) -> list[str]:
    """Describe which layout is the fastest if messages slow the kernels beside them; nothing if it is the first."""
    best, other = ranking.fitting[0], min(ranking.fitting, key=lambda plan: _rounded(plan.time.slowest))
    first, second = (f"{plan.time.total:,.3f} to {plan.time.slowest:,.3f} s" for plan in (best, other))
    if first == second:
        return []
    return [
        f"the best layout takes {first}, depending on how much messages slow the kernels beside them; "
        f"if they slow them most, {other.overrides} is faster: {second}"
    ]


def describe_limits(best: Plan, options: Layout, fixed: Mapping[str, bool]) -> list[str]:
    """Describe what restricts the fastest layout besides memory, and which numbers near the given ones are faster.

    Args:
        fixed: options that every layout has.
    """
    job, cluster, num_devices, limits, faster = best.job, best.cluster, best.layout.world_size, [], []
    options = dataclasses.replace(options, pp_size=best.layout.pp_size)
    excluded = [layout for layout in _grids(job, options, num_devices) if job.global_batch_size % layout.dp_size]
    if excluded:
        dp_sizes = ", ".join(f"{layout.dp_size:,}" for layout in excluded)
        tp_sizes = ", ".join(f"{layout.tp_size:,}" for layout in excluded)
        limits.append(
            f"the batch of {job.global_batch_size:,} is not a multiple of dp_size {dp_sizes}, which excludes tp_size "
            f"{tp_sizes}"
        )
    if crosses_nodes(best.layout, cluster):
        groups = f"the tensor groups of tp_size {best.layout.tp_size}"
        limits.append(f"{groups} cross nodes of {cluster.devices_per_node} devices")
    for override, changed, number in _alternatives(job, cluster, num_devices, options) if excluded else ():
        speeds = [
            plan.tokens_per_s for plan in rank_layouts(changed, cluster, number, options, fixed=fixed).fitting[:1]
        ]
        faster += [f"{override} ({speed:,.0f} tokens/s)" for speed in speeds if speed > best.tokens_per_s]
    return ["; ".join(limits + ([f"faster: {', '.join(faster)}"] if faster else []))] if limits else []


def _alternatives(
    job: Workload, cluster: Cluster, num_devices: int, options: Layout
) -> list[tuple[str, Workload, int]]:
    """The next numbers of devices and batches below and above on which a layout fits, as an override, job and number.

    Numbers of devices on which it fits only with tensor groups that cross nodes are left out if there are others.
    """
    numbers = [n for n in _possible_numbers(job, cluster, options) if _fits_on(job, cluster, n, options)]
    numbers = [n for n in numbers if _fits_on(job, cluster, n, options, within_nodes=True)] or numbers
    multiples = range(num_devices, 2 * job.global_batch_size + 1, num_devices)
    batches = [(b, dataclasses.replace(job, global_batch_size=b)) for b in nearest(job.global_batch_size, multiples)]
    return [(f"num_devices={n}", job, n) for n in nearest(num_devices, numbers)] + [
        (f"global_batch_size={b}", changed, num_devices)
        for b, changed in batches
        if _fits_on(changed, cluster, num_devices, options)
    ]


def nearest(number: int, numbers: Iterable[int]) -> list[int]:
    """The next of `numbers` below and above `number`."""
    numbers = sorted(numbers)
    return [n for n in numbers if n < number][-1:] + [n for n in numbers if n > number][:1]


def _possible_numbers(job: Workload, cluster: Cluster, options: Layout) -> set[int]:
    """Numbers of devices that some grid uses fully."""
    return {layout.world_size for layout in _possible_layouts(job, options, cluster.num_devices)}


def largest_number(job: Workload, cluster: Cluster, options: Layout) -> int:
    """The largest number of devices that some fitting layout uses fully; if none fits, that some grid uses fully."""
    numbers = sorted(_possible_numbers(job, cluster, options), reverse=True)
    return next((number for number in numbers if _fits_on(job, cluster, number, options)), max(numbers, default=1))


def _fits_on(job: Workload, cluster: Cluster, num_devices: int, options: Layout, within_nodes: bool = False) -> bool:
    """Whether some layout fits, tried with the settings that need least memory."""
    grids, least = _grids(job, options, num_devices), job.change(recompute="full")
    if within_nodes:
        grids = [layout for layout in grids if not crosses_nodes(layout, cluster)]
    smallest = ((least.change(b), layout) for layout in grids for b in micro_batch_sizes(job, layout)[:1])
    return first_that_fits(smallest, cluster.usable_bytes) is not None


def nearest_plan(job: Workload, wanted: Layout, cluster: Cluster) -> Plan | None:
    """The working plan closest to `job` on the grid `wanted`, with its options; None if the cluster has none.

    Closest in the number of devices, then `tp_size`, then the micro-batch, then the recomputation.
    """
    index = RECOMPUTE_MODES.index

    def distance(candidate: Candidate) -> tuple[float, float, float, int]:
        other, layout = candidate
        return (
            abs(math.log2(layout.world_size / wanted.world_size)),
            abs(math.log2(layout.tp_size / wanted.tp_size)),
            abs(math.log2(other.micro_batch_size / job.micro_batch_size)),
            abs(index(other.config.recompute) - index(job.config.recompute)),
        )

    candidates = _candidates(job, _possible_layouts(job, wanted, cluster.num_devices))
    found = first_that_fits(sorted(candidates, key=distance), cluster.usable_bytes)
    return found and Plan(*found[:2], cluster)


def _relaxed(wanted: Layout) -> list[Layout]:
    """`wanted`, then without each option that restricts the batch or the sequence, then without both."""
    without = [(), ("batch_halves",), ("sequence_parallel",), _RESTRICTING_OPTIONS]
    return list(dict.fromkeys(dataclasses.replace(wanted, **dict.fromkeys(names, False)) for names in without))


def suggest_layout(job: Workload, wanted: Layout, cluster: Cluster) -> str:
    """For messages: the nearest layout that works, and which options it must drop, or the least memory of a rank.

    Other numbers of stages are tried last, powers of two and the fewest first.
    """
    for layout in (relaxed for each in with_other_stages(job, wanted) for relaxed in _relaxed(each)):
        near = nearest_plan(job, layout, cluster)
        if near is not None:
            dropped = [name for name in _RESTRICTING_OPTIONS if getattr(wanted, name) != getattr(layout, name)]
            options = " and ".join(f"parallel.{name}=true" for name in dropped)
            pronoun = "it" if len(dropped) == 1 else "them"
            without = f"no layout works with {options}; without {pronoun} " if dropped else ""
            return f"{without}the nearest layout that works is {near.overrides}"
    layouts = [each for layout in _relaxed(wanted) for each in _possible_layouts(job, layout, cluster.num_devices)]
    needs = [(estimate_memory(*candidate).total, candidate) for candidate in _candidates(job, layouts)]
    if not needs:
        return "no layout works"
    needed, (least, layout) = min(needs, key=lambda need: need[0])
    return (
        f"no layout works: the one that needs least memory, {least.overrides(layout)}, still needs "
        f"{needed / GIB:.1f} GiB per rank"
    )
