"""Run a function on several real processes with gloo, and always clean up."""

import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import warm  # noqa: F401  forks them from a server with torch imported
from torch.distributed.device_mesh import init_device_mesh

from lmscale.parallel import ParallelContext, choose_communicator


def run_ranks(worker: Callable, world_size: int, *args: Any, timeout_s: float = 540.0) -> list[Any]:
    """Run `worker(rank, *args)` on `world_size` new processes with a gloo group; returns the results by rank.

    Raises:
        RuntimeError: a rank failed (with its traceback) or timed out; the processes are ended in both cases.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _enter, (world_size, folder, worker, args), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not processes.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{worker.__name__} on {world_size} ranks took longer than {timeout_s} s")
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder) / f"result_{rank}", weights_only=False) for rank in range(world_size)]


def _enter(rank: int, world_size: int, folder: str, worker: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=60))
    try:
        torch.save(worker(rank, *args), Path(folder) / f"result_{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def make_context(tp_size: int, dp_size: int = 1) -> ParallelContext:
    """This rank's context in a (data, tensor) grid over all ranks, with the communicator of a real run."""
    mesh = init_device_mesh("cpu", (dp_size, tp_size), mesh_dim_names=("data", "tensor"))
    return ParallelContext(
        tp_rank=mesh.get_local_rank("tensor"),
        tp_size=tp_size,
        dp_rank=mesh.get_local_rank("data"),
        dp_size=dp_size,
        tp_group=mesh.get_group("tensor"),
        dp_group=mesh.get_group("data"),
        tp_communicator=choose_communicator(mesh.get_group("tensor"), timedelta(seconds=60)),
    )


def free_port() -> int:
    """A free TCP port below the range that gloo uses for its own connections, and out of reach of other test processes.

    It is used later, so that a process that drew the same one could take it.
    """
    first = 20000 + 3000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)
    while True:
        port = random.SystemRandom().randrange(first, first + 3000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
