"""CPU threads of a rank."""

import os
import re

import torch

from .runtime.world import usable_cores, world_from_outside


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
