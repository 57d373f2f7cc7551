"""The layout and the recomputation that fit this machine, and whether a run does; no torch on a host without GPUs."""

from dataclasses import dataclass, replace

from ..config import BatchConfig, Layout, TransformerConfig
from ..config.checks import refuse
from ..config.finetune import FinetuneConfig
from ..config.layout import ParallelConfig
from ..config.pretrain import RunConfig
from ..planner.flops import scored_tokens
from ..planner.memory import GIB, checkpoint_bytes, estimate_memory, first_that_fits, usable_bytes
from ..planner.workload import Workload, auto_tp_sizes, layout_at, model_sizes, no_size_fits, with_other_stages
from ..runtime.machine import host_memory_available, usable_cores
from ..runtime.world import World
from ..shared_files import check_sockets

WORKERS_PER_CORE = 4  # loader processes mostly wait for a disk
SAMPLE_OVERHEAD_BYTES = 1024  # Python objects of one sequence: a dict of arrays and its reference in the data order


@dataclass(frozen=True)
class Choice:
    """A layout and a recomputation mode that fit this machine.

    Args:
        workload: with its recomputation mode.
        batch: how `layout` divides the sequences of a step.
    """

    workload: Workload
    layout: Layout
    batch: BatchConfig


def choose(run: RunConfig, workload: Workload, world: World | None) -> Choice:
    """Choose what fits: the layout, and on a GPU with `model.recompute=auto` the mode that recomputes least.

    On a CPU nothing is recomputed by choice: free memory changes and differs between hosts, and ranks that chose
    different modes would deadlock.

    Args:
        workload: of `run`, with nothing recomputed where `model.recompute` is `auto`.
        world: ranks that another launcher has started; None if lmscale will start them on this host.

    Raises:
        ValueError: sizes that do not divide the training or do not match the ranks; what this host cannot hold.
    """
    layout, needed = choose_layout(run.parallel, workload, world)
    batch = run.check_layout(layout)
    workload.check_layout(layout)
    check_host(run, layout, world, workload.top_k or 0)
    if needed is None:
        modes = workload.in_each_mode() if run.model.recompute == "auto" and workload.on_gpu else [workload]
        workload, needed = choose_mode(run.name, modes, layout, world)
    if run.checkpoint.async_ or layout.zero1:
        check_copies("parallel.zero1" if layout.zero1 else "checkpoint.async", workload, layout, needed, world)
    return Choice(workload, layout, batch)


def choose_layout(request: ParallelConfig, workload: Workload, world: World | None) -> tuple[Layout, int | None]:
    """Resolve the sizes of the grid.

    Returns:
        the layout; and the bytes that its rank needs, None unless a size is `auto` and had to fit.

    Raises:
        ValueError: the world size does not match, or no size fits (`auto`).
    """
    on_gpu, devices, needed = workload.on_gpu, 1 if world is None else world.size, None
    if on_gpu and world is None:
        import torch

        devices = torch.cuda.device_count()

    def at(tp_size: int, pp_size: int) -> Layout:
        if request.dp_size == "auto" and world is not None:  # all ranks that were started must be used
            return request.layout(tp_size=tp_size, pp_size=pp_size, dp_size=max(1, devices // (tp_size * pp_size)))
        return layout_at(workload, request, tp_size, pp_size, devices)

    sizes = model_sizes(workload, request.tp_size, request.num_stages, request.pad_heads)
    layout = fewest = at(*sizes[0])
    if "auto" in (request.tp_size, request.num_stages):
        memory = device_memory(on_gpu)
        usable = usable_bytes(memory, on_gpu, _sharing(workload, fewest, world))
        found = first_that_fits([(workload, at(*size)) for size in sizes], usable)
        # If lmscale starts the ranks on this host, more ranks need more of its memory, never less.
        if found is None or (not on_gpu and world is None and found[1].world_size > fewest.world_size):
            place = "a GPU" if on_gpu else "free memory of this host"
            raise no_size_fits(request, f"divides the model and fits the {memory / GIB:.1f} GiB of {place}")
        _, layout, needed = found
    if world is not None and layout.world_size != world.size:
        raise ValueError(f"the world size must be {layout.formula}, but {world.size} ranks were started")
    if world is None and on_gpu and layout.world_size > devices:
        way_out = "" if request.tp_size == "auto" else "; trainer.accelerator=cpu trains on its cores"
        raise ValueError(f"{layout.formula} must be at most the GPUs of this host, but it has {devices}{way_out}")
    return layout, needed


def _sharing(workload: Workload, layout: Layout, world: World | None) -> int:
    """Ranks that share the memory of a device: on a CPU those of this host; each GPU has its own."""
    return 1 if workload.on_gpu else _ranks_of_host(layout, world)


def _ranks_of_host(layout: Layout, world: World | None) -> int:
    return layout.world_size if world is None else world.local_size


def check_host(run: RunConfig, layout: Layout, world: World | None, top_k: int = 0) -> None:
    """Refuse more threads, loader processes or sequences than this host can hold.

    Raises:
        ValueError: more threads per rank than cores; more loader processes than `WORKERS_PER_CORE` per core, or a
            temporary folder in which they cannot have sockets; a step whose sequences, which the rank loads before the
            step, do not fit into the free memory.
    """
    cores = usable_cores()
    bounds = {"trainer.num_threads": (run.trainer.num_threads, cores, "")}
    bounds["data.num_workers"] = (run.data.num_workers, WORKERS_PER_CORE * cores, f"{WORKERS_PER_CORE} times ")
    for name, (value, bound, times) in bounds.items():
        if value is not None and value > bound:
            refuse(name, f"at most {times}the {cores} cores that this process may use", value)
    if run.data.num_workers:
        check_sockets("data.num_workers")
    num_tensors = run.model.traits.num_sample_tensors  # int64 [s], per sample and once more stacked
    sequence = SAMPLE_OVERHEAD_BYTES + 2 * num_tensors * 8 * run.data.seq_length
    scored = scored_tokens(run.model, run.data.seq_length)
    sequence += 2 * scored * top_k * (8 + 4)  # ids and log-probabilities of a teacher's cache, likewise
    there = host_memory_available()
    largest = there // (sequence * _ranks_of_host(layout, world)) * layout.dp_size
    if run.global_batch_size > largest:
        raise ValueError(
            f"`global_batch_size` must be at most {largest:,}, the sequences of a step that fit the "
            f"{there / 2**30:.1f} GiB free on this host, but is {run.global_batch_size:,}"
        )


def choose_mode(name: str, modes: list[Workload], layout: Layout, world: World | None) -> tuple[Workload, int]:
    """The first of these modes whose weights, gradients, optimizer state and activations fit, and its bytes per rank.

    Args:
        name: of the run.

    Raises:
        ValueError: none fits; see `describe_shortage`.
    """
    workload, on_gpu = modes[0], modes[0].on_gpu
    there, sharing = device_memory(on_gpu), _sharing(workload, layout, world)
    found = first_that_fits([(mode, layout) for mode in modes], usable_bytes(there, on_gpu, sharing))
    if found is not None:
        return found[0], found[2]
    raise ValueError(describe_shortage(name, workload, layout, there, sharing))


def describe_shortage(name: str, workload: Workload, layout: Layout, there: int, sharing: int) -> str:
    """The bytes that a rank needs and has, and the smallest layout that would fit such devices: of this job, or else
    with the smallest micro-batch and full recomputation.

    Args:
        name: of the run.
        there: bytes of a device's memory, which `sharing` ranks share.
    """
    on_gpu, needed = workload.on_gpu, estimate_memory(workload, layout).total
    least = workload.change(2 if layout.batch_halves else 1, "full")
    device, size, free = ("GPU", "of this size", "") if on_gpu else ("host", "with as much free memory", " free")
    tp_sizes = auto_tp_sizes(workload, layout.pad_heads)
    tried = [
        (job, replace(stages, tp_size=tp_size))
        for stages in with_other_stages(workload, layout)
        for job in (workload, least)
        for tp_size in tp_sizes
    ]
    fits = first_that_fits(tried, usable_bytes(there, on_gpu))
    if fits is None:
        way_out = (
            f"no tp_size that divides this model fits {device}s {size}, even with micro_batch_size="
            f"{least.micro_batch_size} model.recompute=full and any parallel.pp_size"
        )
    else:
        job, smallest, _ = fits
        way_out = (
            f"the smallest layout that fits is {job.overrides(smallest)} on {smallest.world_size} {device}(s) {size}"
        )
    modes = [(each, layout) for each in workload.in_each_mode()]
    here = first_that_fits(modes, usable_bytes(there, on_gpu, sharing))
    if here is not None:
        way_out += f"; here model.recompute={here[0].config.recompute} fits"
    elif fits is not None and fits[0] is workload and workload.config.recompute != "full":
        way_out += "; model.recompute=full and a smaller micro_batch_size need less"
    reserved, stages = -usable_bytes(0, on_gpu), f"pp_size {layout.pp_size}, " if layout.pp_size > 1 else ""
    return (
        f"the memory a rank needs must be at most what its {device} has{free}: {name} at {workload.dtype}, "
        f"tp_size {layout.tp_size}, {stages}micro_batch_size {workload.micro_batch_size} needs {needed:,} bytes "
        f"({needed / GIB:.1f} GiB) per rank, and {reserved / GIB:.1f} GiB for the framework, x {sharing} rank(s) on "
        f"this {device}, which has {there:,} bytes ({there / GIB:.1f} GiB){free}; {way_out}"
    )


def check_copies(key: str, workload: Workload, layout: Layout, needed: int | None, world: World | None) -> None:
    """Refuse what makes saves write from copies where the host cannot hold those of its ranks.

    On a CPU the ranks train in the same memory.

    Args:
        key: `checkpoint.async`, or `parallel.zero1`, whose ranks gather what they write.
        needed: bytes of a rank's tensors; None: not estimated yet.

    Raises:
        ValueError: with the bytes of a rank's copies and of the host.
    """
    ranks, in_use = _ranks_of_host(layout, world), 0
    if not workload.on_gpu:
        in_use = estimate_memory(workload, layout).total if needed is None else needed
    copies, there = checkpoint_bytes(workload, layout), host_memory_available()
    if copies + in_use > usable_bytes(there, False, ranks):
        raise ValueError(
            f"`{key}` must be false where the host, with {there / GIB:.1f} GiB free, cannot hold {copies:,} "
            f"bytes ({copies / GIB:.1f} GiB) more for each of its {ranks} rank(s), but is true"
        )


def finetuning_workload(run: FinetuneConfig, model: TransformerConfig, on_gpu: bool) -> Workload:
    """The work of finetuning a model, with the head of its pretraining in place of the task's, which is smaller."""
    sizes = run.micro_batch_size, run.global_batch_size, run.task.max_seq_length, run.precision.dtype
    return Workload(model, *sizes, half_moments=run.optimizer.moments == "bf16", on_gpu=on_gpu)


def state_bytes(workload: Workload, layout: Layout) -> int:
    """Memory of a rank's weights, gradients and optimizer."""
    needed = estimate_memory(workload, layout)
    return needed.weights + needed.gradients + needed.optimizer_state


def device_memory(on_gpu: bool) -> int:
    """Bytes available to the ranks on a device: all memory of the first GPU, or the free memory of the host."""
    if on_gpu:
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    return host_memory_available()
