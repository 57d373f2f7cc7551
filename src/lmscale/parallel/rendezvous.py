"""The start of the default process group: the store at which the ranks meet, and the wait for all of them.

Every wait is a loop in Python, because torch's own ones let no signal end a rank.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

_ANSWER_S = 60.0  # of what listens: rank 0's store gives it at once
_SAID_AFTER_S = 60.0
_num_started = 0  # process groups of this process, the same number on all ranks


def start_process_group(
    backend: str,
    address: tuple[str, int],
    rank: int,
    world_size: int,
    timeout: timedelta,
    start_timeout: timedelta,
    **options: Any,
) -> None:
    """Start the default process group of this process's next job; one rank alone needs no port.

    Args:
        address: host and port at which rank 0 listens, the same for all jobs.
        timeout: how long a collective may wait.
        start_timeout: how long the ranks wait for each other here.
        **options: of `init_process_group`.

    Raises:
        ValueError: another process, such as another job on the same host, listens at this port; rank 0 cannot, or
            does not within the time limit; or some ranks have not come within it.
    """
    global _num_started
    _num_started += 1
    store = dist.HashStore()
    if world_size > 1:
        # torch names the groups of every job alike; the addresses of the last one are still in the store.
        store = dist.PrefixStore(f"{_num_started}", _open_store(*address, rank, world_size, start_timeout))
        store.set_timeout(timeout)
        _wait_for_all(store, rank, world_size, start_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **options)


@cache
def _open_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store at which the ranks meet, the same for all jobs of this process.

    Were it opened again for the next one, a rank could still meet the store that rank 0 is closing.
    """
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent has opened it
        return next(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout))[0]
    if rank > 0:
        _wait_for_listener(address, port, timeout)
    answer: Future[dist.Store] = Future()
    # In a thread, because torch has no time limit for a listener that never answers.
    threading.Thread(target=_connect, args=(address, port, rank, answer), daemon=True).start()
    try:
        store = answer.result(_ANSWER_S)
    except (dist.DistError, TimeoutError) as error:
        if rank == 0 and "EADDRINUSE" not in str(error):
            reason = str(error).partition("\n")[0] or f"no answer within {_ANSWER_S:.0f} s"
            raise ValueError(f"{_must_listen(address, port)}, but: {reason}") from None
        raise ValueError(
            f"`MASTER_PORT` must be free on {address}, the host of rank 0, but another process listens at {port}"
        ) from None
    return store


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return when all ranks have called this with the store of one job."""

    def problem() -> str:
        number = store.add("started", 0)
        return f"{number} have" if number < world_size else ""

    store.add("started", 1)
    _poll(problem, f"all {world_size} ranks must start", timeout, speaks=rank == 0)


def _wait_for_listener(address: str, port: int, timeout: timedelta) -> None:
    """Return when something listens there: from then on, an answer that does not come is a fault."""

    def problem() -> str:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    _poll(problem, _must_listen(address, port), timeout)


def _must_listen(address: str, port: int) -> str:
    return f"rank 0 must listen at {address}:{port} (MASTER_ADDR and MASTER_PORT)"


def _poll(problem: Callable[[], str], rule: str, timeout: timedelta, speaks: bool = True) -> None:
    """Wait until there is no problem any more; one that lasts is said once."""
    start, said = time.monotonic(), not speaks
    while found := problem():
        seconds = time.monotonic() - start
        if seconds > timeout.total_seconds():
            raise ValueError(f"{rule} within {timeout}, but: {found}")
        if seconds > _SAID_AFTER_S and not said:
            print(f"waiting: {rule}, but: {found}", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.1)


def _connect(address: str, port: int, rank: int, answer: Future[dist.Store]) -> None:
    limit = timedelta(seconds=_ANSWER_S)
    # The store of another job would answer, too.
    owner = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    try:
        store = dist.TCPStore(address, port, None, rank == 0, limit, wait_for_workers=False, multi_tenant=True)
        store.set(owner, "") if rank == 0 else store.wait([owner])
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(store)
