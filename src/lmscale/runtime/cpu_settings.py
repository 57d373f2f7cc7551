"""What lmscale sets in a rank's process on a CPU: the number of threads, and what the heap keeps."""

import ctypes
import os
import re
import sys

import torch

from .machine import usable_cores
from .world import world_from_outside

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_MAPPED_BYTES = 32 * 2**20  # glibc's own value once it has freed tensors of about that size
_NEVER = 2**31 - 1


def share_cores(requested: int | None = None) -> tuple[int, str]:
    """Set this rank's number of CPU threads.

    Args:
        requested: by the configuration, which precedes OMP_NUM_THREADS; without either the ranks of this host share the
            cores.

    Returns:
        the number, and what decided it, in words. torchrun sets OMP_NUM_THREADS to 1 if it is not set, so that a 1 of
        a torchrun with several ranks decides nothing. Ranks that are tasks of `srun` have its `--cpus-per-task`, and
        may be bound to these cores.
    """
    world = world_from_outside()
    local_size = 1 if world is None else world.local_size
    given = re.match(r"\s*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", ""))  # OpenMP also takes a list, one per level
    set_by_torchrun = local_size > 1 and world.launcher == "torchrun" and given and given[1] == "1"
    cores = usable_cores()
    if requested is not None:
        threads, reason = requested, "trainer.num_threads"
    elif given and not set_by_torchrun:
        threads, reason = int(given[1]), "OMP_NUM_THREADS"
    elif local_size > 1 and world.num_cores:
        threads, reason = min(world.num_cores, cores), "--cpus-per-task"
    else:
        threads, reason = max(1, cores // local_size), f"an equal share of {cores} cores"
    torch.set_num_threads(threads)
    return threads, reason


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
