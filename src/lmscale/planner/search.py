"""Search the layouts of a job on a cluster: all possible ones ranked by step time, and the nearest that works."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config import Layout, Recompute
from ..config.cluster import Cluster
from ..config.layout import ParallelConfig
from .memory import GIB
from .plan import Plan, make_plan
from .workload import Workload, rank_memory

LARGEST_MICRO_BATCH = 64
_MODES = tuple(Recompute)
_NO_OPTIONS = ParallelConfig()
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


def tensor_sizes(job: Workload, largest: int, pad_heads: bool = False) -> list[int]:
    """Every `tp_size` up to `largest` and the number of heads that cuts the model into equal shards, ascending."""
    sizes = []
    for tp_size in range(1, min(largest, job.config.num_attention_heads) + 1):
        try:
            job.config.check_tensor_parallel(tp_size, pad_heads)
        except ValueError:
            continue
        sizes.append(tp_size)
    return sizes


def _grids(job: Workload, num_devices: int, request: ParallelConfig) -> list[Layout]:
    """Every layout of all `num_devices` that divides the model, with the options of `request`."""
    sizes = tensor_sizes(job, num_devices, request.pad_heads)
    return [request.layout(tp_size=p, dp_size=num_devices // p) for p in sizes if num_devices % p == 0]


def micro_batch_sizes(job: Workload, layout: Layout) -> list[int]:
    """Powers of two that divide a data rank's share of the batch, and the share itself if it is small; ascending.

    With `batch_halves` only even ones; none if the layout does not divide the batch or, where it cuts it, the sequence.
    """
    if job.global_batch_size % layout.dp_size or (layout.cuts_sequence and job.seq_length % layout.tp_size):
        return []
    share = job.global_batch_size // layout.dp_size
    powers = {2**n for n in range(int(math.log2(LARGEST_MICRO_BATCH)) + 1) if share % 2**n == 0}
    sizes = sorted(powers | ({share} if share <= LARGEST_MICRO_BATCH else set()))
    return [b for b in sizes if b % layout.batch_parts == 0]


def divides(job: Workload, layout: Layout) -> bool:
    """Whether a layout divides the batch into whole micro-batches and these, where it cuts them, into equal parts."""
    whole = job.global_batch_size % (job.micro_batch_size * layout.dp_size) == 0
    halves = job.micro_batch_size % layout.batch_parts == 0
    return whole and halves and not (layout.cuts_sequence and job.seq_length % layout.tp_size)


def rank_layouts(
    job: Workload,
    cluster: Cluster,
    num_devices: int,
    request: ParallelConfig = _NO_OPTIONS,
    compares_options: bool = False,
) -> Ranking:
    """Plan every tp x dp = `num_devices`, micro-batch and recomputation mode.

    Args:
        request: its options hold for all layouts. With `sequence_parallel` a `tp_size` that does not divide the
            sequence is left out, and with `batch_halves` an odd micro-batch on several tensor ranks.
        compares_options: plan every layout also with `zero1` and, on GPUs, where layers are compiled,
            `batch_halves`, each alone and both.

    Raises:
        ValueError: no grid of `num_devices` divides model and batch; names the next numbers that do.
    """
    fitting, too_large = [], []
    for layout in _grids(job, num_devices, request):
        layouts = _with_options(layout, cluster) if compares_options else [layout]
        plans = [
            make_plan(job.change(b, mode), layout, cluster)
            for layout in layouts
            for b in micro_batch_sizes(job, layout)
            for mode in _MODES
        ]
        fits = [plan for plan in plans if plan.missing_bytes <= 0]
        fitting += fits
        if plans and not fits:
            too_large.append(min(plans, key=lambda plan: plan.missing_bytes))
    if not fitting and not too_large:
        near = [override for override, *_ in _alternatives(job, cluster, num_devices, request)]
        sequence = " and the sequence" * request.sequence_parallel
        even = " (into even shares if `tp_size` is above 1)" * request.batch_halves
        raise ValueError(
            f"`num_devices` must be a `tp_size` that divides the model{sequence} times a `dp_size` that divides the "
            f"batch of {job.global_batch_size:,}{even}, but is {num_devices:,}; "
            + (f"a layout fits with {', '.join(near)}" if near else "no layout fits on another number either")
        )
    return Ranking(tuple(sorted(fitting, key=lambda plan: plan.time.total)), tuple(too_large))


def _with_options(layout: Layout, cluster: Cluster) -> list[Layout]:
    """The layout and those with `zero1`, `batch_halves` or both besides, where these have an effect."""
    layouts = [layout]
    has_effect = {"zero1": layout.dp_size > 1, "batch_halves": layout.tp_size > 1 and cluster.is_gpu}
    for name, is_useful in has_effect.items():
        if is_useful and not getattr(layout, name):
            layouts += [dataclasses.replace(each, **{name: True}) for each in layouts]
    return layouts


def rank_on_machine(
    job: Workload, cluster: Cluster, num_devices: int, request: ParallelConfig, modes: Sequence[Recompute]
) -> list[Plan]:
    """Plan `job`, with the micro-batch that it has, in every layout of one machine, fastest first.

    Each layout without and with `zero1`, and on GPUs, where layers are compiled, `batch_halves`. On CPUs a layout may
    have fewer ranks than there are cores: each has an equal share of the cores, and is modelled as if its threads
    divided all work without loss. So two cores have four layouts: one rank of two threads, two tensor ranks, and two
    data ranks without and with `zero1`.

    Args:
        num_devices: GPUs or cores of the machine, all used.
        request: its options hold for all layouts.
        modes: of recomputation; each layout has the first with which it fits, or the last.
    """
    counts = [num_devices] if cluster.is_gpu else [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    plans = []
    for num_ranks in counts:
        device = _join_devices(cluster, num_devices // num_ranks, num_ranks)
        for layout in (each for grid in _grids(job, num_ranks, request) for each in _with_options(grid, cluster)):
            if not divides(job, layout):
                continue
            tried = [make_plan(job.change(recompute=mode), layout, device) for mode in modes]
            plans.append(next((plan for plan in tried if plan.missing_bytes <= 0), tried[-1]))
    return sorted(plans, key=lambda plan: plan.time.total)


def _join_devices(cluster: Cluster, num_joined: int, num_devices: int) -> Cluster:
    """The cluster with `num_joined` of its devices taken as one, and `num_devices` of these."""
    rates = cluster.roofline
    return dataclasses.replace(
        cluster,
        num_devices=num_devices,
        memory_gib=num_joined * cluster.memory_gib,
        roofline=dataclasses.replace(
            rates,
            product_tflops=num_joined * rates.product_tflops,
            copy_gb_s=num_joined * rates.copy_gb_s,
            attention_forward_tflops=num_joined * rates.attention_forward_tflops,
            attention_backward_tflops=num_joined * rates.attention_backward_tflops,
        ),
    )


def describe_limits(best: Plan, request: ParallelConfig) -> list[str]:
    """Describe what restricts the fastest layout besides memory, and which numbers near the given ones are faster."""
    job, cluster, num_devices, tp_size = best.job, best.cluster, best.num_devices, best.layout.tp_size
    limits = []
    grids = [(layout.tp_size, layout.dp_size) for layout in _grids(job, num_devices, request)]
    excluded = [(p, d) for p, d in grids if job.global_batch_size % d]
    if excluded:
        tp_sizes, dp_sizes = (", ".join(f"{size:,}" for size in sizes) for sizes in zip(*excluded, strict=True))
        limits.append(
            f"the batch of {job.global_batch_size:,} is not a multiple of dp_size {dp_sizes}, which excludes tp_size "
            f"{tp_sizes}"
        )
    if _crosses_nodes(tp_size, num_devices, cluster):
        limits.append(f"the tensor groups of tp_size {tp_size} cross nodes of {cluster.devices_per_node} devices")
    faster = []
    for override, changed, number in _alternatives(job, cluster, num_devices, request) if excluded else ():
        speed = rank_layouts(changed, cluster, number, request, compares_options=True).fitting[0].tokens_per_s
        faster += [f"{override} ({speed:,.0f} tokens/s)"] if speed > best.tokens_per_s else []
    return ["; ".join(limits + ([f"faster: {', '.join(faster)}"] if faster else []))] if limits else []


def _crosses_nodes(tp_size: int, num_devices: int, cluster: Cluster) -> bool:
    """Whether some group of consecutive tensor ranks is on two nodes."""
    return num_devices > cluster.devices_per_node and cluster.devices_per_node % tp_size != 0


def _alternatives(
    job: Workload, cluster: Cluster, num_devices: int, request: ParallelConfig
) -> list[tuple[str, Workload, int]]:
    """The next numbers of devices and batches below and above on which a layout fits, as an override, job and number.

    Numbers of devices on which it fits only with tensor groups that cross nodes are left out if there are others.
    """
    numbers = [n for n in _possible_numbers(job, cluster, request) if _fits_on(job, cluster, n, request)]
    numbers = [n for n in numbers if _fits_on(job, cluster, n, request, within_nodes=True)] or numbers
    multiples = range(num_devices, 2 * job.global_batch_size + 1, num_devices)
    batches = [(b, dataclasses.replace(job, global_batch_size=b)) for b in _nearest(job.global_batch_size, multiples)]
    return [(f"num_devices={n}", job, n) for n in _nearest(num_devices, numbers)] + [
        (f"global_batch_size={b}", changed, num_devices)
        for b, changed in batches
        if _fits_on(changed, cluster, num_devices, request)
    ]


def _nearest(number: int, numbers: Iterable[int]) -> list[int]:
    """The next of `numbers` below and above `number`."""
    numbers = sorted(numbers)
    return [n for n in numbers if n < number][-1:] + [n for n in numbers if n > number][:1]


def neighbours(number: int, numbers: Iterable[int]) -> str:
    """For messages: the next of `numbers` below and above `number`."""
    return " and ".join(f"{n:,}" for n in _nearest(number, numbers)) or "none"


def largest_number(job: Workload, cluster: Cluster, request: ParallelConfig = _NO_OPTIONS) -> int:
    """The largest number of devices that some fitting layout uses fully; if none fits, that some grid uses fully."""
    numbers = sorted(_possible_numbers(job, cluster, request), reverse=True)
    return next((number for number in numbers if _fits_on(job, cluster, number, request)), numbers[0])


def _fits_on(
    job: Workload, cluster: Cluster, num_devices: int, request: ParallelConfig, within_nodes: bool = False
) -> bool:
    """Whether some layout fits, tried with the settings that need least memory."""
    for layout in _grids(job, num_devices, request):
        if within_nodes and _crosses_nodes(layout.tp_size, num_devices, cluster):
            continue
        sizes = micro_batch_sizes(job, layout)
        if sizes and make_plan(job.change(sizes[0], Recompute.FULL), layout, cluster).missing_bytes <= 0:
            return True
    return False


def _possible_numbers(job: Workload, cluster: Cluster, request: ParallelConfig) -> set[int]:
    """Numbers of devices that some grid uses fully; always contains 1."""
    sizes = tensor_sizes(job, cluster.num_devices, request.pad_heads)
    divisors = [
        d for d in range(1, min(job.global_batch_size, cluster.num_devices) + 1) if job.global_batch_size % d == 0
    ]
    grids = [(p, d) for p in sizes for d in divisors if p * d <= cluster.num_devices]
    return {p * d for p, d in grids if micro_batch_sizes(job, request.layout(tp_size=p, dp_size=d))}


def nearest_plan(job: Workload, wanted: Layout, cluster: Cluster) -> Plan | None:
    """The working plan closest to `job` on the grid `wanted`, with its options; None if the cluster has none.

    Closest in the number of devices, then `tp_size`, then the micro-batch, then the recomputation.
    """

    def distance(candidate: tuple[Layout, int, Recompute]) -> tuple[float, float, float, int]:
        layout, micro_batch_size, mode = candidate
        return (
            abs(math.log2(layout.world_size / wanted.world_size)),
            abs(math.log2(layout.tp_size / wanted.tp_size)),
            abs(math.log2(micro_batch_size / job.micro_batch_size)),
            abs(_MODES.index(mode) - _MODES.index(job.config.recompute)),
        )

    for layout, micro_batch_size, mode in sorted(_candidates(job, wanted, cluster), key=distance):
        changed = job.change(micro_batch_size, mode)
        if rank_memory(changed, layout, cluster.is_gpu).total <= cluster.usable_bytes:
            return make_plan(changed, layout, cluster)
    return None


def _candidates(job: Workload, wanted: Layout, cluster: Cluster) -> list[tuple[Layout, int, Recompute]]:
    """Every grid that divides model, batch and cluster, with every micro-batch size and recomputation mode."""
    layouts = [
        dataclasses.replace(wanted, tp_size=tp_size, dp_size=dp_size)
        for tp_size in tensor_sizes(job, cluster.num_devices, wanted.pad_heads)
        for dp_size in range(1, cluster.num_devices // tp_size + 1)
    ]
    return [(layout, b, mode) for layout in layouts for b in micro_batch_sizes(job, layout) for mode in _MODES]


def smallest_need(job: Workload, wanted: Layout, cluster: Cluster) -> Plan:
    """The layout on the cluster whose rank needs least memory, with the options of `wanted` or without some."""
    candidates = [found for layout in _relaxed(wanted) for found in _candidates(job, layout, cluster)]

    def needed_bytes(candidate: tuple[Layout, int, Recompute]) -> int:
        layout, micro_batch_size, mode = candidate
        return rank_memory(job.change(micro_batch_size, mode), layout, cluster.is_gpu).total

    layout, micro_batch_size, mode = min(candidates, key=needed_bytes)
    return make_plan(job.change(micro_batch_size, mode), layout, cluster)


def _relaxed(wanted: Layout) -> list[Layout]:
    """`wanted`, then without each option that restricts the batch or the sequence, then without both."""
    without = [(), ("batch_halves",), ("sequence_parallel",), _RESTRICTING_OPTIONS]
    return list(dict.fromkeys(dataclasses.replace(wanted, **dict.fromkeys(names, False)) for names in without))


def suggest_layout(job: Workload, wanted: Layout, cluster: Cluster) -> str:
    """For messages: the nearest layout that works, and which options it must drop, or the least memory of a rank."""
    for layout in _relaxed(wanted):
        near = nearest_plan(job, layout, cluster)
        if near is not None:
            dropped = [name for name in _RESTRICTING_OPTIONS if getattr(wanted, name) != getattr(layout, name)]
            options = " and ".join(f"parallel.{name}=true" for name in dropped)
            pronoun = "it" if len(dropped) == 1 else "them"
            without = f"no layout works with {options}; without {pronoun} " if dropped else ""
            return f"{without}the nearest layout that works is {near.overrides}"
    least = smallest_need(job, wanted, cluster)
    return (
        f"no layout works: the one that needs least memory, {least.overrides}, still needs "
        f"{least.needed_bytes / GIB:.1f} GiB per rank"
    )
