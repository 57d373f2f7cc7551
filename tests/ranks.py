"""Run a function on several real processes with gloo, and always clean up."""

import contextlib
import faulthandler
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import warm  # noqa: F401  forks them from a server with torch imported
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmscale import parallel
from lmscale.config import Layout
from lmscale.parallel import ParallelContext


def run_ranks(worker: Callable, world_size: int, *args: Any, timeout_s: float = 540.0) -> list[Any]:
    """Run `worker(rank, *args)` on `world_size` new processes with a gloo group; returns the results by rank.

    Raises:
        RuntimeError: a rank failed (with its traceback) or timed out (with every rank's stack); the processes are ended
            in both cases.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _enter, (world_size, folder, worker, args), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not processes.join(timeout=1.0):
                if time.monotonic() > deadline:
                    stacks = _stacks(processes.processes, Path(folder))
                    raise RuntimeError(
                        f"{worker.__name__} on {world_size} ranks took longer than {timeout_s} s\n{stacks}"
                    )
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder) / f"result_{rank}", weights_only=False) for rank in range(world_size)]


def _stacks(processes: list[BaseProcess], folder: Path) -> str:
    """What each rank that still runs is doing."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR2)
    time.sleep(2.0)
    return "\n".join(f"rank {path.name[-1]}:\n{path.read_text()}" for path in sorted(folder.glob("stack_*")))


def _enter(rank: int, world_size: int, folder: str, worker: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    with open(Path(folder) / f"stack_{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR2, stack)
        _join(rank, world_size, folder, worker, args)
        faulthandler.unregister(signal.SIGUSR2)


def _join(rank: int, world_size: int, folder: str, worker: Callable, args: tuple) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=60))
    try:
        torch.save(worker(rank, *args), Path(folder) / f"result_{rank}")
        if dist.is_initialized():  # not after `run_in_turn`
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a world without the others: collectives return at once and send nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_context(tp_size: int, dp_size: int = 1) -> ParallelContext:
    """This rank's context in a grid over all ranks, with the communicator of a real run."""
    return parallel.make_context(Layout(tp_size=tp_size, dp_size=dp_size), "cpu", timedelta(seconds=60))


def run_in_turn(rank: int, run: Callable, jobs: list) -> list[Any]:
    """Call `run` with each job on all ranks, in the environment of torchrun; this module's process group ends first.

    Each job starts and ends a process group of its own, at a port that no other one uses: a rank that began the next
    job while rank 0 ended the last one would otherwise meet the old store, and wait for ever.
    """
    world_size, ports = dist.get_world_size(), [free_ports(len(jobs))]
    dist.broadcast_object_list(ports, src=0)
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= torchrun_rank(rank, world_size)
    results = []
    for job, port in zip(jobs, ports[0], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(run(job))
    return results


def torchrun_rank(rank: int, world_size: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank on one host, with a port at which nobody listens."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": 1}
    names |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in names.items()}


def free_ports(count: int = 1) -> list[int]:
    """Different free TCP ports below the range that gloo uses for its own connections, and out of reach of other test
    processes.

    They are used later, so that a process that drew the same one could take it.
    """
    first = 20000 + 3000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)
    ports = []
    for port in random.SystemRandom().sample(range(first, first + 3000), 3000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports
