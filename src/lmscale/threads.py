"""CPU threads of a rank."""

import os
import re

import torch


def share_cores(local_size: int, requested: int | None = None) -> tuple[int, str]:
    """Set this rank's number of CPU threads.

    Args:
        local_size: ranks on this host.
        requested: by the configuration, which precedes OMP_NUM_THREADS; without either the ranks share the cores.

    Returns:
        the number, and what decided it, in words. torchrun sets OMP_NUM_THREADS to 1 if it is not set, so that a 1 of
        a torchrun with several ranks decides nothing. Ranks that are tasks of `srun` have its `--cpus-per-task`, and
        may be bound to these cores.
    """
    given = re.match(r"\s*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", ""))  # OpenMP also takes a list, one per level
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "lmscale")  # of our own launcher, which sets no threads
    set_by_torchrun = given and given[1] == "1" and local_size > 1 and not run_id.startswith("lmscale")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    are_tasks = local_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    per_task = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if are_tasks else 0
    if requested is not None:
        threads, reason = requested, "trainer.num_threads"
    elif given and not set_by_torchrun:
        threads, reason = int(given[1]), "OMP_NUM_THREADS"
    elif per_task:
        threads, reason = min(per_task, cores), "--cpus-per-task"
    else:
        threads, reason = max(1, cores // local_size), f"an equal share of {cores} cores"
    torch.set_num_threads(threads)
    return threads, reason
