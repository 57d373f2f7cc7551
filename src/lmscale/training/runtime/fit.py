"""The grid of a run's ranks, its recomputation, and whether it fits the memory; no torch on a host without GPUs."""

import ctypes
import dataclasses
from pathlib import Path

from ...config import Layout, Recompute
from ...config.layout import ParallelConfig
from ...config.pretrain import RunConfig
from ...kernels import choose_attention
from ...launcher import World, world_from_outside
from ...planner.job import (
    STAND_IN_VOCAB_SIZE,
    Job,
    checkpoint_bytes,
    first_mode_that_fits,
    largest_dp_size,
    rank_memory,
    smallest_layout,
    usable_bytes,
)
from ...planner.memory import GIB
from .host_memory import host_memory_available


def check_fits_host(run: RunConfig) -> None:
    """Refuse a run on CPUs that cannot fit, in less time than torch takes to import; see `check_memory`.

    A run that may train on a GPU, or whose layout was measured, is left to `check_run`, and one that fits with the
    attention that needs less of those that `model.attention=auto` chooses from.

    Raises:
        ValueError: as `resolve_layout` and `check_memory`.
    """
    requested = run.trainer.accelerator
    if requested == "gpu" or (requested == "auto" and _may_have_gpu()) or run.parallel.record is not None:
        return
    if run.model.attention == "auto":
        least = choose_attention(on_gpu=False, compiles=True, dropout=run.model.attention_dropout)
        run = dataclasses.replace(run, model=run.model.with_attention(least))
    world = world_from_outside()
    layout = resolve_layout(run.parallel, job_of(run), world, "cpu")
    check_memory(resolve_recompute(run, layout, "cpu"), layout, world, "cpu")


def _may_have_gpu() -> bool:
    """Whether torch might find a GPU: NVIDIA's driver is installed, or the kernel has AMD's device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def resolve_layout(request: ParallelConfig, job: Job, world: World | None, accelerator: str) -> Layout:
    """Resolve the sizes of the grid, with `auto` replaced.

    Args:
        world: ranks that another launcher has started; None if lmscale will start them on this host.

    Raises:
        ValueError: the world size does not match, or no size fits (`auto`).
    """
    tp_size, dp_size = request.tp_size, request.dp_size
    devices = world.size if world is not None else _count_gpus() if accelerator == "gpu" else 1

    def data_ranks(tp: int) -> int:
        if dp_size != "auto":
            return dp_size
        if world is not None:  # all ranks that were started must be used
            return max(1, devices // tp)
        return largest_dp_size(job.global_batch_size // job.micro_batch_size, devices // tp)

    if tp_size == "auto":
        on_gpu, ranks = accelerator == "gpu", 1
        if not on_gpu:  # the local ranks share the host's memory
            ranks = world.local_size if world is not None else 1 if dp_size == "auto" else dp_size
        usable = usable_bytes(device_memory(accelerator), on_gpu, ranks)
        found = smallest_layout(job, lambda tp: request.layout(tp_size=tp, dp_size=data_ranks(tp)), usable, on_gpu)
        tp_size = None if found is None else found.tp_size
        # If lmscale starts the ranks on this host, more ranks need more of its memory, never less.
        if tp_size is None or (tp_size > 1 and accelerator == "cpu" and world is None):
            raise ValueError(
                "no tp_size fits (`parallel.tp_size`=auto): no power of two divides the model and fits the "
                f"{device_memory(accelerator) / 2**30:.1f} GiB of "
                f"{'free memory of this host' if accelerator == 'cpu' else 'a GPU'}"
            )
    layout = request.layout(tp_size=tp_size, dp_size=data_ranks(tp_size))
    if world is not None and layout.world_size != world.size:
        raise ValueError(
            f"the world size must be `parallel.tp_size` x `parallel.dp_size` ({tp_size} x {layout.dp_size}), "
            f"but {world.size} ranks were started"
        )
    if world is None and accelerator == "gpu" and layout.world_size > devices:
        way_out = "" if request.tp_size == "auto" else "; trainer.accelerator=cpu trains on its cores"
        raise ValueError(
            f"`parallel.tp_size` x `parallel.dp_size` ({tp_size} x {layout.dp_size}) must be at most the GPUs of this "
            f"host, but it has {devices}{way_out}"
        )
    return layout


def resolve_recompute(run: RunConfig, layout: Layout, accelerator: str) -> RunConfig:
    """The run with `model.recompute=auto` resolved: on a GPU the mode that recomputes least of those that fit.

    On a CPU none: free memory changes and differs between hosts, and ranks that chose different modes would deadlock.
    If no mode fits it is none too, and `check_memory` refuses the run.
    """
    mode = None
    if run.model.recompute == "auto" and accelerator == "gpu":
        mode = first_mode_that_fits(job_of(run), layout, usable_bytes(device_memory(accelerator), True), True)
    return dataclasses.replace(run, model=run.model.with_recompute(mode or Recompute.NONE))


def check_memory(run: RunConfig, layout: Layout, world: World | None, accelerator: str) -> None:
    """Refuse a run whose weights, gradients, optimizer state and activations cannot fit.

    On a CPU the local ranks share the host's memory; on GPUs each has its own.

    Raises:
        ValueError: with the bytes needed per rank, the bytes available and the smallest layout that would fit such
            devices: of this job, or else with the smallest micro-batch and full recomputation.
    """
    on_gpu, job, sharing = accelerator == "gpu", job_of(run), 1
    if not on_gpu:
        sharing = world.local_size if world is not None else layout.world_size
    there, needed = device_memory(accelerator), rank_memory(job, layout, on_gpu).total
    if needed <= usable_bytes(there, on_gpu, sharing):
        return
    least = job.change(2 if layout.batch_halves else 1, Recompute.FULL)
    device, size, free = ("GPU", "of this size", "") if on_gpu else ("host", "with as much free memory", " free")
    for smaller in (job, least):
        fits = smallest_layout(
            smaller, lambda tp: dataclasses.replace(layout, tp_size=tp), usable_bytes(there, on_gpu), on_gpu
        )
        if fits is not None:
            way_out = (
                f"the smallest layout that fits is {smaller.overrides(fits)} on {fits.world_size} {device}(s) {size}"
            )
            break
    else:
        way_out = (
            f"no tp_size that divides this model fits {device}s {size}, even with micro_batch_size="
            f"{least.micro_batch_size} model.recompute=full"
        )
    mode = first_mode_that_fits(job, layout, usable_bytes(there, on_gpu, sharing), on_gpu)
    if mode is not None:
        way_out += f"; here model.recompute={mode.value} fits"
    elif smaller is job and job.config.recompute is not Recompute.FULL:
        way_out += "; model.recompute=full and a smaller micro_batch_size need less"
    reserved = -usable_bytes(0, on_gpu)
    raise ValueError(
        f"the memory a rank needs must be at most what its {device} has{free}: {run.name} at {job.dtype}, "
        f"tp_size {layout.tp_size}, micro_batch_size {run.micro_batch_size} needs {needed:,} bytes "
        f"({needed / GIB:.1f} GiB) per rank, and {reserved / GIB:.1f} GiB for the framework, x {sharing} rank(s) on "
        f"this {device}, which has {there:,} bytes ({there / GIB:.1f} GiB){free}; {way_out}"
    )


def check_background_saves(run: RunConfig, layout: Layout, world: World | None, accelerator: str) -> None:
    """Refuse to save in the background where the host cannot hold the copies that its ranks write from.

    On a CPU the ranks train in the same memory.

    Raises:
        ValueError: with the bytes of a rank's copies and of the host.
    """
    if not run.checkpoint.async_:
        return
    job, ranks = job_of(run), world.local_size if world is not None else layout.world_size
    copies, there = checkpoint_bytes(job, layout), host_memory_available()
    in_use = 0 if accelerator == "gpu" else rank_memory(job, layout, False).total
    if copies + in_use > usable_bytes(there, False, ranks):
        raise ValueError(
            f"`checkpoint.async` must be false where the host, with {there / GIB:.1f} GiB free, cannot hold {copies:,} "
            f"bytes ({copies / GIB:.1f} GiB) more for each of its {ranks} rank(s), but is true"
        )


def job_of(run: RunConfig) -> Job:
    """The run as the planner sees it, `compile` resolved; until `model.recompute=auto` is, nothing is recomputed."""
    return Job(
        run.model.with_vocab_size(STAND_IN_VOCAB_SIZE).with_recompute(Recompute.NONE),
        run.micro_batch_size,
        run.global_batch_size,
        run.data.seq_length,
        run.precision.dtype,
        run.trainer.max_steps,
        half_moments=run.optimizer.moments == "bf16",
        compiles=run.compile is True,
    )


def device_memory(accelerator: str) -> int:
    """Bytes available to the ranks on a device: all memory of the first GPU, or the free memory of the host."""
    if accelerator == "gpu":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    return host_memory_available()


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
