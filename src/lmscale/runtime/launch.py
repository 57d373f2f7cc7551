"""Start the ranks with one elastic agent, unless torchrun or srun has started them."""

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..output import escape_unknown_letters, outlast_full_disk
from ..parallel.shared_memory import RankGoneError
from .exit_codes import FAILED, INTERRUPTED, STALLED
from .interruption import PASSED_ON, Interruption
from .lost_rank import CollectiveError, LostRank
from .watchdog import StalledError
from .world import COMPILE_WORKERS, bound_compile_workers, join_ranks, own_run_id, world_from_outside


def launch(worker: Callable[[Any], int], job: Any, world_size: int, max_restarts: int = 0, saves: bool = False) -> None:
    """Run `worker(job)` on every rank; returns when all have succeeded.

    If another launcher has started the ranks, or there is one rank without restarts, the worker runs in this process,
    with torch's variables (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and so on) set also under srun. Otherwise an elastic
    agent starts the ranks and passes them the checked job, so that nothing is parsed or decided twice.

    SIGTERM and SIGUSR1 to this process are passed on to the ranks, which stop at the next step boundary.

    Args:
        worker: a module-level function (it travels by name), decorated with torch elastic's `record`, which keeps the
            error of a rank for this process to show. It returns an exit code.
        job: picklable.
        max_restarts: how often all ranks are restarted after one has died; 0 under another launcher.
        saves: whether the worker saves when it is interrupted. A first SIGINT is then passed on too, and a second one
            kills the ranks; otherwise the first one ends them.

    Raises:
        ValueError: this host has no loopback interface.
        SystemExit: the worker's code if it is not 0; code 1, a rank failed (one line names the first one and its
            error, below the rank's own traceback); code 128 + n, signal n ended the job.
    """
    from_outside = world_from_outside() is not None
    if not from_outside:
        _check_loopback()
    if from_outside or (world_size == 1 and not max_restarts):
        join_ranks()
        try:
            code = worker(job)
        except LostRank:
            raise
        except SystemExit:  # raised by Lightning after Ctrl-C
            _stop(signal.SIGINT)
        if code:
            raise SystemExit(code)
        return
    # The agent does not remove the folder of its error files.
    with tempfile.TemporaryDirectory(prefix="lmscale_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=own_run_id(),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # otherwise the ranks look up this host's full name, which need not resolve
            max_restarts=max_restarts,
            monitor_interval=0.2,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGHUP,SIGQUIT" if saves else "SIGINT,SIGHUP,SIGQUIT",
        )
        # A pipe to a rank holds 64 KiB: beyond, Python would wait until the rank has imported its entry point, and
        # forever if the rank ends before.
        path = Path(folder) / "job.pickle"
        path.write_bytes(pickle.dumps(job))
        code = _run_agent(config, worker, path, saves)
    if code:
        raise SystemExit(code)


def _check_loopback() -> None:
    """Check the interface over which gloo and the agent's store connect the ranks of one host, and one rank itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # sends nothing
    except OSError as error:
        raise ValueError(
            f"this host's loopback interface must be up (`ip link set lo up`), but 127.0.0.1: {error.strerror}"
        ) from None


def _run_worker(worker: Callable[[Any], int], job: Path) -> int:
    escape_unknown_letters()
    outlast_full_disk()
    return worker(pickle.loads(job.read_bytes()))


def _run_agent(config: LaunchConfig, worker: Callable[[Any], int], job: Path, saves: bool) -> int:
    # Silence the agent's warnings about ending ranks and its copy of the traceback, which is printed below.
    for name in (
        "distributed.elastic.agent.server.api",
        "distributed.elastic.multiprocessing.api",
        "multiprocessing.spawn",
    ):
        logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    # torch 2.13 keeps one store over restarts, in which restarted ranks find the addresses of the dead ones.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    user_has_set_it = COMPILE_WORKERS in os.environ
    bound_compile_workers(config.nproc_per_node)  # the ranks import torch before they could
    interruption = Interruption(_pass_on_to_ranks, _kill_ranks, ctrl_c=saves)
    interruption.install()
    # A rank that is being started cannot handle Ctrl-C yet. It inherits the block, and its entry point removes it. Here
    # the signal comes to another thread; Python runs its handler in this one.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    resource_tracker.ensure_running()  # it would start with the first rank, and remove the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return max(elastic_launch(config, _run_worker)(worker, job).values())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if interruption.received is not None:  # before the ranks handled it
            _stop(interruption.received, unsaved=saves and failure.exitcode == -interruption.received != -signal.SIGINT)
        reports = _reports(Path(config.logs_specs.root_log_dir))
        code = STALLED if any(_is_of(report, StalledError) for report in reports.values()) else FAILED
        text = f"rank {rank} failed (exit code {failure.exitcode}): "
        if not isinstance(failure.message, dict):  # a signal leaves a sentence
            text += failure.message
        elif _is_of(failure.message, CollectiveError):
            text += failure.message["message"]
        elif not _is_of(failure.message, StalledError, RankGoneError):
            print(failure.message["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
            text += failure.message["message"]
        else:  # it has printed a line, but the cause is a rank that has not, if the agent's SIGTERM did not end it
            silent = [str(number) for number in range(config.nproc_per_node) if number not in reports]
            whom = f"no report from rank {', '.join(silent)}, which is stuck or gone (exit code {code})"
            text = whom if silent and saves else text + failure.message["message"]
        print(f"error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(code) from None
    except SignalException as error:  # the agent has stopped the ranks
        _stop(error.sigval)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        interruption.restore()
        os.environ.pop(PASSED_ON, None)
        if not user_has_set_it:
            os.environ.pop(COMPILE_WORKERS)  # the next job of a sweep may have other ranks


def _reports(log_folder: Path) -> dict[int, dict]:
    """The errors that the ranks of the last start have left for this process, by rank."""
    starts = sorted(log_folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    reports = {}
    for path in starts[-1].glob("*/error.json") if starts else []:
        with contextlib.suppress(ValueError):  # its rank was killed as it wrote
            reports[int(path.parent.name)] = json.loads(path.read_text())["message"]
    return reports


def _is_of(report: dict, *kinds: type[Exception]) -> bool:
    return report["message"].startswith(tuple(f"{kind.__name__}: " for kind in kinds))


def _pass_on_to_ranks(number: signal.Signals) -> None:
    os.environ[PASSED_ON] = number.name
    for child in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child.pid, number)


def _kill_ranks() -> None:
    for child in multiprocessing.active_children():
        child.kill()
    raise SignalException("a second SIGINT", sigval=signal.SIGINT)


def _stop(number: signal.Signals, unsaved: bool = False) -> None:
    """End with 128 + n, or, for a signal that met ranks which were starting, with the code for requeueing."""
    reason = " outside training: nothing to save" if unsaved else ""
    print(f"stopped by {number.name}{reason}", file=sys.stderr, flush=True)
    raise SystemExit(INTERRUPTED if unsaved else 128 + number) from None
