"""The checks before a process is started or a tensor allocated."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import torch

from ...config import Layout
from ...config.family import check_loads, family_of
from ...config.pretrain import RunConfig
from ...data.tokenizer import check_tokenizer
from ...kernels import Kernels, check_cuda_graphs, choose_kernels
from ...launcher import World, is_first_rank, world_from_outside
from ..output.resuming import find_checkpoint
from .fit import check_background_saves, check_memory, job_of, resolve_layout, resolve_recompute
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


def check_run(run: RunConfig) -> tuple[RunConfig, str, Layout, Kernels, str | None]:
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


def check_host(run: RunConfig, layout: Layout, world: World | None) -> None:
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
