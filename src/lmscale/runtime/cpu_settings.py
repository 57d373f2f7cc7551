"""What lmscale sets in a process that computes on a CPU."""

import ctypes
import sys

from ..results import cpu_flags

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_MAPPED_BYTES = 32 * 2**20  # glibc's own value once it has freed tensors of about that size
_NEVER = 2**31 - 1

_INSTRUCTIONS = {"bf16": {"avx512_bf16", "amx_bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}


def describe_slow_type(dtype: str) -> str:
    """A sentence if this processor, of x86, has no instructions for a half type; otherwise empty.

    bf16 trained 175 instead of 619 tokens/s on an Ice Lake, and 60 instead of 900 on an AMD EPYC with AVX2 (once each).
    """
    names, flags = _INSTRUCTIONS.get(dtype, set()), cpu_flags()
    if not names or not flags or names & flags:
        return ""
    return (
        f"this CPU has no instructions for {dtype} ({', '.join(sorted(names))}): "
        "precision=fp32 was 3 to 15 times as fast on such CPUs"
    )


def keep_heap() -> None:
    """Let glibc's heap keep its size when a step frees its activations, instead of growing anew in the next step.

    The kernel clears each page of a heap that grows. Tensors above 32 MiB stay outside the heap and are returned when
    they are freed, so the heap fragments no more than it does by default. A library that replaces malloc is not
    affected, nor are systems without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)  # setting one of the two fixes the other where it is
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
