"""A thread that ends a rank without progress, and reports what it was doing."""

import contextlib
import faulthandler
import math
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from .exit_codes import STALLED
from .messages import print_error, report

_WRITING_S = 10.0  # a file system that does not answer may be why the rank is stuck


class StalledError(RuntimeError):
    """A rank made no progress; the message says at which step and in which phase."""


class Watchdog:
    """Ends the process when `timeout_s` have passed without progress.

    If another rank has died or hangs, this rank waits inside a collective. There, neither a signal handler nor an
    exception reaches it (NCCL), or only an exception that does not name the step (gloo). So another thread watches the
    time since the last `mark`. Its message goes to stderr and to the launcher, and the stacks into the run folder. If
    our launcher has been killed, the ranks end themselves within a second; otherwise they would still train when the
    job is restarted. A long stop of the whole process (Ctrl-Z, `scontrol suspend`) does not count here; the time limit
    of a collective counts it.

    Args:
        rank: for the message.
        timeout_s: longest time between two marks.
        limit: what sets it, for the message.

    Attributes:
        where: what the rank is doing.
        folder: for `stacks_rank_<rank>.txt`; None, until the ranks have agreed on it: stderr.
    """

    def __init__(self, rank: int, timeout_s: float, limit: str = "`parallel.timeout_minutes`") -> None:
        self.rank, self.timeout_s, self.limit = rank, timeout_s, limit
        self.where, self._since = "the start", time.monotonic()
        self.folder: Path | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, where: str) -> None:
        """Record progress: the training is now at `where`, e.g. "step 17, backward pass"."""
        self.where, self._since = where, time.monotonic()

    def pause(self) -> None:
        """Let any time pass until the next mark, as where a user types."""
        self._since = math.inf

    def start(self) -> None:
        """Start the watchdog."""
        self.mark(self.where)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        launcher = multiprocessing.parent_process()  # None under torchrun, srun or a shell
        last = time.monotonic()
        while not self._stopped.wait(min(1.0, self.timeout_s / 10)):
            if launcher is not None and not launcher.is_alive():
                print_error(f"rank {self.rank} ends because its launcher is gone")
                os._exit(1)
            now = time.monotonic()
            if now - last > self.timeout_s / 2:
                self._since += now - last  # this thread did not run either, so the process was stopped
            last = now
            where, seconds = self.where, now - self._since
            if seconds > self.timeout_s:
                self._end(where, seconds)

    def _end(self, where: str, seconds: float) -> None:
        message = (
            f"rank {self.rank} has not moved for {seconds:.0f} s in {where}: a collective waits for a rank that is "
            f"gone or stuck, or the step takes longer than {self.limit}"
        )
        stacks = self._write_stacks()
        message += f"; stacks: {stacks}" if stacks is not None else ""
        report(StalledError(message))
        if stacks is None:
            faulthandler.dump_traceback(sys.stderr)
        os._exit(STALLED)

    def _write_stacks(self) -> Path | None:
        """Write the stacks of all threads into the run folder; None if they cannot be written there."""
        if self.folder is None:
            return None
        path, written = self.folder / f"stacks_rank_{self.rank}.txt", []

        def write() -> None:
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
                written.append(path)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(_WRITING_S)
        return path if written else None
