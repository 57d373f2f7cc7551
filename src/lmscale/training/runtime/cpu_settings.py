"""What lmscale sets in a process that computes on a CPU."""

import ctypes
import sys

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let glibc's allocator keep what is freed for the next step, and return whether it does.

    By default every tensor above 32 MiB is mapped anew and returned to the kernel when it is freed. A training step
    frees and allocates the same sizes again, and the kernel clears each page anew: a tenth to a seventh of the time of
    a small model's step. The process keeps its peak memory until it ends. A library that replaces malloc (jemalloc,
    tcmalloc) is not affected; other systems than Linux with glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
