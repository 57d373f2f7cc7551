"""Stop gracefully at the next step boundary when a scheduler or a user asks for it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from . import world
from .exit_codes import INTERRUPTED

PASSED_ON = "LMSCALE_INTERRUPTED"  # set by the launcher for the ranks it starts after the signal
SIGNALS = (signal.SIGINT, signal.SIGTERM) + ((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ())
_SAVES = b"\nCtrl-C: saving at the end of this step; a second Ctrl-C stops at once\n"  # below the line of progress


def stop_before_training(leave: Callable[[], None]) -> None:
    """Until the training records signals, let SIGTERM and SIGUSR1 end this process with the code that requeues a job.

    torch and Lightning take seconds to import. Nothing is saved then, and nothing is lost.

    Args:
        leave: called before the process ends.
    """
    for number in SIGNALS[1:]:
        signal.signal(number, partial(_end_unsaved, leave))


def _end_unsaved(leave: Callable[[], None], number: int, frame: FrameType | None) -> None:
    if multiprocessing.parent_process() is not None:  # a worker of a library, which has inherited the handler
        os._exit(128 + number)
    world.asked_to_stop = True
    leave()
    os.write(2, f"stopped by {signal.Signals(number).name} outside training: nothing to save\n".encode())
    os._exit(INTERRUPTED)  # an exception could be caught by what is just being imported


class Interruption:
    """Records SIGINT, SIGTERM and SIGUSR1 while installed; the training checks `received` after each step.

    A second SIGINT ends the job at once. A terminal sends Ctrl-C to the launcher and to its ranks; there the launcher
    counts, and the ranks only record.

    Args:
        then: called with the signal in the handler, in place of announcing the save: by the launcher.
        at_once: called at the second SIGINT.
        ctrl_c: SIGINT is recorded too; without it, it ends the job as usual.
    """

    def __init__(
        self,
        then: Callable[[signal.Signals], None] | None = None,
        at_once: Callable[[], None] = lambda: signal.default_int_handler(signal.SIGINT, None),
        ctrl_c: bool = True,
    ) -> None:
        self.received: signal.Signals | None = None
        self.then, self.at_once, self.ctrl_c = then, at_once, ctrl_c
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python allows no handlers."""
        if PASSED_ON in os.environ:  # before this rank was started or restarted
            self.received = signal.Signals[os.environ[PASSED_ON]]
            if self.received == signal.SIGINT:  # a step of this rank would make the user wait
                os._exit(128 + signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            in_background = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # a shell has made it ignore Ctrl-C
            signals = SIGNALS if self.ctrl_c and not in_background else SIGNALS[1:]
            self._previous = {number: signal.signal(number, self._record) for number in signals}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # blocked while a launcher starts its ranks

    def restore(self) -> None:
        """Restore the previous handlers; a rank goes on to record Ctrl-C, which its launcher may pass on late."""
        for number, handler in self._previous.items():
            if number != signal.SIGINT or multiprocessing.parent_process() is None:
                signal.signal(number, handler)
        self._previous = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        earlier, self.received = self.received, signal.Signals(number)
        world.asked_to_stop = True
        if number == earlier == signal.SIGINT:
            if multiprocessing.parent_process() is None:  # otherwise the launcher decides
                self.at_once()
        elif self.then is not None:
            self.then(self.received)
        elif number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            os.write(2, _SAVES)  # `print` may be interrupted by this handler in the middle of a line
