"""The accelerator of a run: which it is, and what lmscale sets in torch for a GPU and reports in a run's record."""

import os
from typing import Any, Literal

from .machine import has_nvidia_gpu, may_have_gpu, nvidia_driver
from .world import world_from_outside

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # today's name, and the older one
EXPANDABLE = "expandable_segments:True"
# The least compute capability that has the products of a type (Ampere; Ada), and the type to take below it.
_CAPABILITIES = {"bf16": ((8, 0), "fp16"), "fp8": ((8, 9), "bf16")}
_cuda_graphs: set[bool] = set()  # whether the jobs of this process so far use them


def resolve_accelerator(requested: str) -> Literal["cpu", "gpu"]:
    """Whether a run requests `trainer.accelerator=gpu`, or `auto` finds one.

    Raises:
        ValueError: `gpu` without a GPU that torch can use, or a rank does not see the GPUs of its node's ranks; `auto`
            where the machine has a GPU that torch cannot use.
    """
    if requested == "cpu" or (requested == "auto" and not may_have_gpu() and not has_nvidia_gpu()):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if has_nvidia_gpu():
            built_for = "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
            raise ValueError(
                f"`trainer.accelerator` must be cpu where torch cannot use the machine's GPUs, but is {requested}: "
                f"torch {torch.__version__} is built for {built_for}, the driver is {nvidia_driver()} "
                "(CUDA 13 needs 580 or newer, CUDA 12 525)"
            )
        if requested == "gpu":
            raise ValueError("`trainer.accelerator` must be cpu or auto on a machine without a GPU, but is gpu")
        return "cpu"
    world = world_from_outside()
    if world is not None:
        world.check_gpus(torch.cuda.device_count())
    return "gpu"


def check_products(dtype: str) -> None:
    """Refuse a GPU without products of this type, as a V100 is for bf16, which torch would emulate there.

    Raises:
        ValueError: its compute capability is too low.
    """
    import torch

    needed, instead = _CAPABILITIES.get(dtype, ((0, 0), ""))
    found = torch.cuda.get_device_capability()
    if found < needed:
        needed, found = (".".join(map(str, pair)) for pair in (needed, found))
        raise ValueError(
            f"`precision` must be {instead} or another on {torch.cuda.get_device_name()}: {dtype} products need "
            f"compute capability {needed} (it has {found}), but is {dtype}"
        )


def set_allocator(cuda_graphs: bool = False) -> None:
    """Let the segments of the allocator grow, unless the user has set the allocator; before CUDA is initialized.

    A segment that grows serves tensors of any size. Segments of fixed sizes leave gaps that add up over the sizes of
    layers, loss, optimizer and validation, on a card on which the planner leaves 2 GiB. Not with CUDA graphs, which
    keep the addresses of their memory: runs with both were reported to hang (pytorch/torchtitan issue 3306).

    Processes that this one starts inherit the setting.

    Raises:
        ValueError: jobs with and without CUDA graphs in one process, whose allocator is set only once.
    """
    setting = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), EXPANDABLE)
    if setting != EXPANDABLE:
        return
    if _cuda_graphs - {cuda_graphs}:
        raise ValueError("`cuda_graphs` must be the same for all jobs of a sweep, which share the GPU's allocator")
    _cuda_graphs.add(cuda_graphs)
    if not cuda_graphs:
        os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def keep_partial_sums_in_fp32() -> None:
    """Forbid cuBLAS to add the parts of a split product in a half type, which torch allows by default.

    A product is split where few tiles would leave a GPU idle, so that the rounding would change with tp_size and the
    micro-batch. Each part is added in fp32 either way.
    """
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def gpu_settings(on_gpu: bool = True) -> dict[str, Any] | None:
    """The settings in effect, for a record; None on a CPU."""
    if not on_gpu:
        return None
    import torch

    matmul = torch.backends.cuda.matmul
    return {
        "allocator": next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), None),
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
    }
