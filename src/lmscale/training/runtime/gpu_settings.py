"""What lmscale sets in torch for a GPU, once per process, and reports in a run's record."""

import os
import platform
from typing import Any

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # today's name, and the older one
EXPANDABLE = "expandable_segments:True"
_cuda_graphs: set[bool] = set()  # whether the jobs of this process so far use them


def set_allocator(cuda_graphs: bool = False) -> None:
    """Let the segments of the allocator grow, unless the user has set the allocator; before CUDA is initialized.

    A segment that grows serves tensors of any size. Segments of fixed sizes leave gaps that add up over the sizes of
    layers, loss, optimizer and validation, on a card that the planner fills to 2 GiB. Not with CUDA graphs, which keep
    the addresses of their memory: runs with both were reported to hang (pytorch/torchtitan issue 3306).

    Processes that this one starts inherit the setting.

    Raises:
        ValueError: jobs with and without CUDA graphs in one process, whose allocator is set only once.
    """
    setting = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), EXPANDABLE)
    if setting != EXPANDABLE:
        return
    _cuda_graphs.add(cuda_graphs)
    if len(_cuda_graphs) > 1:
        raise ValueError("`cuda_graphs` must be the same for all jobs of a sweep, which share the GPU's allocator")
    if not cuda_graphs:
        os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def keep_partial_sums_in_fp32() -> None:
    """Forbid cuBLAS to add the parts of a split product in a half type, which torch allows by default.

    A product is split where few tiles would leave a GPU idle, so that the rounding would change with tp_size and the
    micro-batch. Each part is added in fp32 either way.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def device_name(on_gpu: bool) -> str:
    """Name of the GPU or processor."""
    return torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu"


def gpu_settings(on_gpu: bool = True) -> dict[str, Any] | None:
    """The settings in effect, for a record; None on a CPU."""
    if not on_gpu:
        return None
    matmul = torch.backends.cuda.matmul
    return {
        "allocator": next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), None),
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
    }
