"""Run an entry point from a study's script, and leave no process behind."""

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def positive(text: str) -> int:
    """The argparse type of a number of steps, jobs or sizes.

    Raises:
        ArgumentTypeError: it is below 1.
    """
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {text}")
    return number


def run_python(script: str | Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """Run a script to its end with the current interpreter. A training saves when it is stopped, so it is waited for.

    SIGTERM is passed on to the script. A terminal sends Ctrl-C to both processes.

    Args:
        script: relative to the clone.
        options: of `subprocess.Popen`.

    Raises:
        CalledProcessError: the script failed.
        SystemExit: 143, after SIGTERM.
    """
    process, received = None, None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        if process is not None:
            process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        process = subprocess.Popen([sys.executable, str(ROOT / script), *arguments], **options)
        if received is not None:  # before there was a process
            process.send_signal(received)
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if received is not None:
        sys.exit(128 + received)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output)
    return subprocess.CompletedProcess(process.args, 0, output)


def run_cell(arguments: Sequence[str], log: Path, codes: Sequence[int] = (0,)) -> tuple[int, resource.struct_rusage]:
    """Run a cell of a study on one thread, from any thread of this process, with which it ends.

    Args:
        arguments: a script, relative to the clone, and what it is given.
        log: takes the output.
        codes: exit codes that are no error.

    Returns:
        the exit code, and what the process used.

    Raises:
        ValueError: it ended with another exit code.
    """
    words = [str(ROOT / arguments[0]), *arguments[1:]]
    process = _start(log, "w", words, {"OMP_NUM_THREADS": "1"}, preexec_fn=_end_with_parent)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it again
    if process.returncode not in codes:
        raise ValueError(f"{log.stem} ended with code {process.returncode}; see {log}")
    return process.returncode, usage


def _start(
    log: Path, mode: str, arguments: Sequence[str], variables: dict[str, str], **options: Any
) -> subprocess.Popen:
    """A process of this Python in the clone, with its output in a log."""
    with open(log, mode, encoding="utf-8") as file:
        both = {"stdout": file, "stderr": file, "cwd": ROOT, "env": os.environ | variables}
        return subprocess.Popen([sys.executable, *arguments], **both, **options)


def _end_with_parent() -> None:
    """Let Linux kill the run with this script: the next start would meet it in the same folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_chains(chains: Sequence[Sequence[Any]], run: Callable[[Any], None], jobs: int) -> None:
    """Run the cells of each chain in order, `jobs` chains at a time, first chains first.

    Raises:
        ValueError: that of the first cell that failed. Cells that run beside it end first; others do not start.
    """
    with ThreadPoolExecutor(jobs) as pool:
        started = [pool.submit(lambda chain=chain: [run(cell) for cell in chain]) for chain in chains]
        try:
            for each in started:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Subprocess:
    """A command of this Python with its output in a log, in a process group of its own that `wait` leaves empty.

    Args:
        log: appended to.
        variables: of its environment, besides this process's.
    """

    def __init__(self, log: Path, arguments: Sequence[str], **variables: str) -> None:
        self.log = log
        self.process = _start(log, "a", arguments, {"HYDRA_FULL_ERROR": "0"} | variables, start_new_session=True)

    def wait(self, limit_s: float) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: it failed, or still runs after `limit_s`.
        """
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"stopped after {limit_s:.0f} s; see {self.log}") from None
        finally:
            self.end()
        if code:
            raise RuntimeError(f"exit code {code}: {self._last_error()}; see {self.log}")

    def end(self) -> None:
        """Kill whatever is left of the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _last_error(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if "rror" in line), "no error message")
