"""The memory of a GPU beyond a rank's tensors: what is free once its process groups exist, and what a run has taken."""

from functools import partial

import torch
import torch.distributed as dist

from ..parallel.pipeline import exchange
from ..planner.memory import GIB
from .strategy import TensorParallelStrategy


def check_free_memory(needed: int, strategy: TensorParallelStrategy) -> None:
    """Refuse a run that does not fit beside the device's contexts, NCCL's buffers and other processes.

    The planner reserves `GPU_RESERVED_GIB` for these; here they are in use, before the model is.

    Args:
        needed: bytes of the rank's tensors, as planned.

    Raises:
        AgreedError: naming the bytes needed, free and in all, of the first such rank.

    Communicates:
        an all-reduce of one number in each group of the grid, which connects it with all of NCCL's algorithms
        (`prepare_connections`); as `exchange` with each neighbour in the pipeline, which no collective connects; as
        `Ranks.agree`.
    """
    parallel = strategy.parallel
    for group, size in (
        (parallel.tp_group, parallel.tp_size),
        (parallel.dp_group, parallel.dp_size),
        (parallel.pp_group, parallel.pp_size),
    ):
        if size > 1:
            dist.all_reduce(torch.zeros(1, device=strategy.root_device), group=group)
    for stage in (parallel.pp_rank - 1, parallel.pp_rank + 1):
        if 0 <= stage < parallel.pp_size:
            exchange(stage, *(torch.zeros(1, device=strategy.root_device) for _ in range(2)), parallel)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # of an earlier job of this process
    strategy.ranks.agree(partial(_check_fits, needed, strategy.ranks.rank))


def _check_fits(needed: int, rank: int) -> None:
    free, total = torch.cuda.mem_get_info()
    if needed > free:
        raise ValueError(
            f"the memory a rank needs must be at most what is free on its GPU once its process groups exist, but rank "
            f"{rank} needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} of {total / GIB:.1f} GiB are "
            "free; end other processes on this GPU, or see parallel.tp_size, micro_batch_size and recomputation"
        )


def memory_metrics(needed: int) -> dict[str, dict]:
    """What the planner counted, and what this rank took, for a record; the context includes other processes."""
    free, total = torch.cuda.mem_get_info()
    taken = {
        "planned": needed,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - torch.cuda.memory_reserved(),
        "total": total,
    }
    return {f"gpu_memory/{name}": {"value": value, "unit": "bytes"} for name, value in taken.items()}
