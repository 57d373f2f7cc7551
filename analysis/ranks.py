"""Run a measurement on several processes of this host that form one process group."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(minutes=30)


def on_ranks(num_ranks: int, measure: Callable[..., Any], *arguments: Any, on_gpu: bool = False) -> list[Any]:
    """Call `measure(rank, *arguments)` on every rank; returns the results by rank, which are numbers, text or tensors.

    Args:
        measure: a function of a module, which each process imports.
        on_gpu: one GPU per rank, over NCCL; otherwise one thread per rank, over gloo.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (folder, num_ranks, on_gpu, measure, arguments), nprocs=num_ranks)
        return [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(num_ranks)]


def _enter(rank: int, folder: str, num_ranks: int, on_gpu: bool, measure: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpu else None
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", rank=rank, world_size=num_ranks, store=store, timeout=TIMEOUT, device_id=device
    )
    torch.save(measure(rank, *arguments), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()
