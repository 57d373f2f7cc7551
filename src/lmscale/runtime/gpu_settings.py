"""What lmscale sets in torch for a GPU, once per process, and reports in a run's record."""

import os
import platform
from typing import Any

import torch

from .accelerator import ALLOCATOR_VARIABLES


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
