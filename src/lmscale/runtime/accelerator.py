"""The accelerator of a run: which it is, and how torch's allocator is set before a GPU is used."""

import ctypes
import os
import re
from pathlib import Path
from typing import Literal

from .world import world_from_outside

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # today's name, and the older one
EXPANDABLE = "expandable_segments:True"
# The least compute capability that has the products of a type (Ampere; Ada), and the type to take below it.
_CAPABILITIES = {"bf16": ((8, 0), "fp16"), "fp8": ((8, 9), "bf16")}
DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")
_cuda_graphs: set[bool] = set()  # whether the jobs of this process so far use them


def resolve_accelerator(requested: str) -> Literal["cpu", "gpu"]:
    """Whether a run requests `trainer.accelerator=gpu`, or `auto` finds one.

    Raises:
        ValueError: `gpu` without a GPU that torch can use, or a rank does not see the GPUs of its node's ranks; `auto`
            where the machine has a GPU that torch cannot use.
    """
    if requested == "cpu" or (requested == "auto" and not _may_have_gpu() and not _has_nvidia_gpu()):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if _has_nvidia_gpu():
            built_for = "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
            raise ValueError(
                f"`trainer.accelerator` must be cpu where torch cannot use the machine's GPUs, but is {requested}: "
                f"torch {torch.__version__} is built for {built_for}, the driver is {_driver_version()} "
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


def _may_have_gpu() -> bool:
    """Whether torch might find a GPU: NVIDIA's driver is installed, or the kernel has AMD's device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def _has_nvidia_gpu() -> bool:
    """Whether this process may open a GPU of NVIDIA's, whatever torch can use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    return not hidden and any(DEVICES.glob("nvidia[0-9]*"))


def _driver_version() -> str:
    try:
        return re.search(r"\d+\.\d[\d.]*", DRIVER.read_text(encoding="utf-8"))[0]
    except (OSError, TypeError):  # no such file, or no number in it
        return "unknown"


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
