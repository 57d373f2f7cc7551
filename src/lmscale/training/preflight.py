"""Everything that can be refused before a process is started or a tensor allocated."""

import os
from pathlib import Path

import torch

from ..config import ParallelConfig, TransformerConfig
from ..perf.memory import estimate_memory, smallest_layout
from ..run_config import ParallelRequest, RunConfig
from .launch import World


def resolve_layout(
    request: ParallelRequest, config: TransformerConfig, run: RunConfig, world: World | None, accelerator: str
) -> ParallelConfig:
    """Sizes of the grid: what was asked for, with `auto` filled in.

    Args:
        world: ranks that exist already; None where lmscale will start them on this host.

    Raises:
        ValueError: the world has another size, or no size fits (`auto`).
    """
    tp_size, dp_size = request.tp_size, request.dp_size
    devices = world.size if world is not None else torch.cuda.device_count() if accelerator == "gpu" else None
    if tp_size == "auto":
        ranks = world.local_size if world is not None and accelerator == "cpu" else 1
        tp_size = smallest_layout(
            config,
            run.micro_batch_size,
            run.data.seq_length,
            run.precision.dtype,
            device_memory(accelerator),
            ranks,
            on_gpu=accelerator == "gpu",
        )
        if tp_size is None:
            raise ValueError(
                "`parallel.tp_size`=auto found no power of two that divides the model and fits the memory of "
                f"{device_memory(accelerator) / 2**30:.1f} GiB a device"
            )
    if dp_size == "auto":
        dp_size = 1 if devices is None else max(1, devices // tp_size)
    layout = ParallelConfig(tp_size, dp_size)
    if world is not None and layout.world_size != world.size:
        raise ValueError(
            f"the world size must be `tp_size` x `dp_size` ({tp_size} x {dp_size}), but {world.size} ranks were started"
        )
    if world is None and accelerator == "gpu" and layout.world_size > devices:
        raise ValueError(
            f"`tp_size` x `dp_size` ({tp_size} x {dp_size}) must be at most the GPUs of this host, but it has {devices}"
        )
    return layout


def check_memory(
    config: TransformerConfig, run: RunConfig, layout: ParallelConfig, world: World | None, accelerator: str
) -> None:
    """Refuse a run whose weights, gradients, optimizer state and activations cannot fit.

    On a CPU the local ranks share the host's memory; on GPUs each has its own.

    Raises:
        ValueError: with the bytes needed a rank, the bytes there and the smallest tp_size that would fit devices of
            this size.
    """
    dtype, seq_length = run.precision.dtype, run.data.seq_length
    on_gpu = accelerator == "gpu"
    estimate = estimate_memory(config, layout.tp_size, run.micro_batch_size, seq_length, dtype, layout.dp_size, on_gpu)
    sharing = 1
    if accelerator == "cpu":
        sharing = world.local_size if world is not None else layout.world_size
    there = device_memory(accelerator)
    if estimate.total * sharing <= there:
        return
    fits = smallest_layout(config, run.micro_batch_size, seq_length, dtype, there, 1, on_gpu)
    device = "host" if accelerator == "cpu" else "GPU"
    way_out = (
        f"the smallest layout that fits is parallel.tp_size={fits} on {fits} {device}s of this size"
        if fits is not None and (fits > layout.tp_size or sharing > 1)
        else "no tp_size that divides this model fits devices of this size"
    )
    if run.model.get("recompute") != "full":
        way_out += "; model.recompute=full and a smaller micro_batch_size need less"
    raise ValueError(
        f"the memory a rank needs must be at most what its {device} has: {run.name} at {dtype}, "
        f"tp_size {layout.tp_size}, micro_batch_size {run.micro_batch_size} needs {estimate.total:,} bytes "
        f"({estimate.total / 2**30:.1f} GiB) a rank x {sharing} rank(s) on this {device}, which has {there:,} "
        f"({there / 2**30:.1f} GiB); {way_out}"
    )


def device_memory(accelerator: str) -> int:
    """Bytes a rank may use: the whole memory of the first GPU, or what is free on the host (and in its cgroup)."""
    if accelerator == "gpu":
        return torch.cuda.get_device_properties(0).total_memory
    return host_memory_available()


def host_memory_available() -> int:
    """Free bytes of this host, no more than its control group allows."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: all of the memory is the best that is known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit != "max":
            free = min(free, int(limit) - used)
    except (OSError, ValueError):  # no version 2 control group
        pass
    return free
