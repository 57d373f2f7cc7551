"""What lmscale sets in a process that computes on a CPU."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_MAPPED_BYTES = 32 * 2**20  # glibc's own value once it has freed tensors of about that size
_NEVER = 2**31 - 1


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
