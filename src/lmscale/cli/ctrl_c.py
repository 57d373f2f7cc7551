"""Ctrl-C ends an entry point with one line, also while it imports its libraries; entry points import this first.

Importing torch takes seconds, and a module that is being imported may catch KeyboardInterrupt and go on half-made. So
the exception is raised only in `run_hydra_main` and outside imports; elsewhere the process ends at once. A rank that
lmscale starts keeps this handler until its worker installs its own, and leaves the line to its launcher.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from ..runtime import world

_has_launcher = "__mp_main__" in sys.modules  # multiprocessing sets it, which a command has not imported yet
before_exit: list[Callable[[], None]] = []  # called by `leave`


def leave() -> None:
    """Do, in place of `finally`, what is left to do where a signal ends the process."""
    while before_exit:
        before_exit.pop(0)()


def _handle(number: int, frame: FrameType | None) -> None:
    world.asked_to_stop = True
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        if frame.f_code.co_name == "run_hydra_main":
            raise KeyboardInterrupt
        frame = frame.f_back
    if not _has_launcher:
        leave()
        os.write(2, b"stopped by SIGINT\n")
    os._exit(128 + number)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores it for background processes
    signal.signal(signal.SIGINT, _handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a launcher blocks it while its ranks start
