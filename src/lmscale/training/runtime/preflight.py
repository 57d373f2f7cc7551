"""The checks before a process is started or a tensor allocated."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import torch

from ...config import ParallelConfig, Recompute
from ...config.family import check_loads, family_of
from ...config.layout import ParallelRequest
from ...config.pretrain import RunConfig
from ...data.tokenizer import check_tokenizer
from ...kernels import Kernels, check_cuda_graphs, choose_kernels
from ...launcher import World, is_first_rank, world_from_outside
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
from ..output.resuming import find_checkpoint
from .gpu_settings import set_allocator
from .host_memory import host_memory_available
from .kernel_choice import compiling_pays, kept_compile, resolve_attention
from .launch import resolve_accelerator
from .measured_layout import take_measured_layout
from .paths import check_paths
from .run_lock import check_not_in_use

WORKERS_PER_CORE = 4  # loader processes mostly wait for a disk
FLOAT8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
SAMPLE_OVERHEAD_BYTES = 1024  # Python objects of one sequence: a dict of arrays and its reference in the data order


def check_values(values: dict) -> None:
    """`check_run` for a configuration in plain values, for the jobs of a sweep."""
    check_run(RunConfig.from_dict(values))


def check_run(run: RunConfig) -> tuple[RunConfig, str, ParallelConfig, Kernels, str | None]:
    """Check all of a run that needs no corpus: the machine, sizes, memory, paths.

    Returns:
        the run with `trainer.accelerator`, `model.recompute` and `compile` resolved if they are `auto`, and
        `model.attention=auto` unless it is measured later, the accelerator, the layout, the kernels, and the checkpoint
        to resume from.

    Raises:
        ValueError: anything invalid in the configuration, in one line.
    """
    check_loads(run.model.family)
    accelerator, world = resolve_accelerator(run.trainer.accelerator), world_from_outside()
    if accelerator == "gpu":
        set_allocator(run.cuda_graphs)
    if run.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("`logger.wandb` must be false where wandb is not installed (pip install wandb), but is true")
    if is_first_rank():
        check_not_in_use(Path(run.run_dir))
    check_paths(run)
    on_gpu, resume_from = accelerator == "gpu", find_checkpoint(run)
    kernels = choose_kernels(
        on_gpu=on_gpu,
        kernels=run.kernels,
        compiles=kept_compile(run, on_gpu, resume_from),
        pays_on_cpu=compiling_pays(run, 1 if world is None else world.size // world.local_size),
        cuda_graphs=run.cuda_graphs,
        dtype=run.precision.dtype,
    )
    trainer = dataclasses.replace(run.trainer, accelerator=accelerator)
    run = dataclasses.replace(run, trainer=trainer, compile=kernels.compiles)
    request = run.parallel
    if request.record is not None:
        request, run = take_measured_layout(run, on_gpu)
    run = resolve_attention(run, on_gpu, kernels.compiles, resume_from)
    # The memory of a rank depends on the kernels, and these on neither the layout nor the recomputation.
    layout = resolve_layout(request, job_of(run), world, accelerator)
    run.check_layout(layout.tp_size, layout.dp_size)
    run = resolve_recompute(run, layout, accelerator)
    check_cuda_graphs(kernels, on_gpu, run.precision.dtype, run.model.recompute.value, layout.tp_size)
    if kernels.float8 and on_gpu:
        check_float8(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    check_host(run, layout, world)
    check_memory(run, layout, world, accelerator)
    check_background_saves(run, layout, world, accelerator)
    check_tokenizer(run.tokenizer, run.model.family)
    return run, accelerator, layout, kernels, resume_from


def check_float8(device_name: str, capability: tuple[int, int]) -> None:
    """Refuse a GPU that has no float8 products.

    Raises:
        ValueError: its compute capability is below that of Ada and Hopper.
    """
    if capability < FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (FLOAT8_CAPABILITY, capability))
        raise ValueError(
            f"`precision` must be bf16 or another on a {device_name}: float8 products need compute capability {needed} "
            f"(it has {found}), but is fp8"
        )


def check_host(run: RunConfig, layout: ParallelConfig, world: World | None) -> None:
    """Refuse more threads, loader processes or sequences than this host can hold, and an unwritable run folder.

    Raises:
        ValueError: more threads per rank than cores; more loader processes than `WORKERS_PER_CORE` per core; a step
            whose sequences, which the rank loads before the step, do not fit into the free memory.
    """
    cores = os.cpu_count() or 1
    bounds = {"trainer.num_threads": (run.trainer.num_threads, cores, "")}
    bounds["data.num_workers"] = (run.data.num_workers, WORKERS_PER_CORE * cores, f"{WORKERS_PER_CORE} times ")
    for name, (value, bound, times) in bounds.items():
        if value is not None and value > bound:
            raise ValueError(f"`{name}` must be at most {times}the {cores} cores of this machine, but is {value}")
    num_tensors = family_of(run.model.family).num_sample_tensors  # int64 [s], per sample and once more stacked
    sequence = SAMPLE_OVERHEAD_BYTES + 2 * num_tensors * 8 * run.data.seq_length
    there, ranks = host_memory_available(), world.local_size if world is not None else layout.world_size
    largest = there // (sequence * ranks) * layout.dp_size
    if run.global_batch_size > largest:
        raise ValueError(
            f"`global_batch_size` must be at most {largest:,}, the sequences of a step that fit the "
            f"{there / 2**30:.1f} GiB free on this host, but is {run.global_batch_size:,}"
        )
    if Path(run.run_dir).exists() and not os.access(run.run_dir, os.W_OK | os.X_OK):
        raise ValueError(f"`hydra.run.dir` must be a folder that can be written, but is {run.run_dir}")


def resolve_layout(request: ParallelRequest, job: Job, world: World | None, accelerator: str) -> ParallelConfig:
    """Resolve the sizes of the grid, with `auto` replaced.

    Args:
        world: ranks that another launcher has started; None if lmscale will start them on this host.

    Raises:
        ValueError: the world size does not match, or no size fits (`auto`).
    """
    tp_size, dp_size = request.tp_size, request.dp_size
    devices = world.size if world is not None else torch.cuda.device_count() if accelerator == "gpu" else 1

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
        found = smallest_layout(job, lambda tp: request.resolve(tp, data_ranks(tp)), usable, on_gpu)
        tp_size = None if found is None else found.tp_size
        # If lmscale starts the ranks on this host, more ranks need more of its memory, never less.
        if tp_size is None or (tp_size > 1 and accelerator == "cpu" and world is None):
            raise ValueError(
                "no tp_size fits (`parallel.tp_size`=auto): no power of two divides the model and fits the memory of "
                f"{device_memory(accelerator) / 2**30:.1f} GiB per {'host' if accelerator == 'cpu' else 'GPU'}"
            )
    layout = request.resolve(tp_size, data_ranks(tp_size))
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


def resolve_recompute(run: RunConfig, layout: ParallelConfig, accelerator: str) -> RunConfig:
    """The run with `model.recompute=auto` resolved: on a GPU the mode that recomputes least of those that fit.

    On a CPU none: free memory changes and differs between hosts, and ranks that chose different modes would deadlock.
    If no mode fits it is none too, and `check_memory` refuses the run.
    """
    mode = None
    if run.model.recompute == "auto" and accelerator == "gpu":
        mode = first_mode_that_fits(job_of(run), layout, usable_bytes(device_memory(accelerator), True), True)
    return dataclasses.replace(run, model=run.model.with_recompute(mode or Recompute.NONE))


def check_memory(run: RunConfig, layout: ParallelConfig, world: World | None, accelerator: str) -> None:
    """Refuse a run whose weights, gradients, optimizer state and activations cannot fit.

    On a CPU the local ranks share the host's memory; on GPUs each has its own.

    Raises:
        ValueError: with the bytes needed per rank, the bytes available and the smallest tp_size that would fit
            devices of this size.
    """
    on_gpu, job, sharing = accelerator == "gpu", job_of(run), 1
    if not on_gpu:
        sharing = world.local_size if world is not None else layout.world_size
    there, needed = device_memory(accelerator), rank_memory(job, layout, on_gpu).total
    if needed <= usable_bytes(there, on_gpu, sharing):
        return
    fits = smallest_layout(job, lambda tp: dataclasses.replace(layout, tp_size=tp), usable_bytes(there, on_gpu), on_gpu)
    device = "GPU" if on_gpu else "host"
    way_out = (
        f"the smallest layout that fits is parallel.tp_size={fits.tp_size} parallel.dp_size={fits.dp_size} on "
        f"{fits.world_size} {device}s of this size"
        if fits is not None and (fits.tp_size > layout.tp_size or sharing > 1)
        else "no tp_size that divides this model fits devices of this size"
    )
    mode = first_mode_that_fits(job, layout, usable_bytes(there, on_gpu, sharing), on_gpu)
    if mode is not None:
        way_out += f"; here model.recompute={mode.value} fits"
    elif job.config.recompute is not Recompute.FULL:
        way_out += "; model.recompute=full and a smaller micro_batch_size need less"
    reserved = -usable_bytes(0, on_gpu)
    raise ValueError(
        f"the memory a rank needs must be at most what its {device} has: {run.name} at {job.dtype}, "
        f"tp_size {layout.tp_size}, micro_batch_size {run.micro_batch_size} needs {needed:,} bytes "
        f"({needed / GIB:.1f} GiB) per rank, and {reserved / GIB:.1f} GiB for the framework, x {sharing} rank(s) on "
        f"this {device}, which has {there:,} ({there / GIB:.1f} GiB); {way_out}"
    )


def check_background_saves(run: RunConfig, layout: ParallelConfig, world: World | None, accelerator: str) -> None:
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
        return torch.cuda.get_device_properties(0).total_memory
    return host_memory_available()
