"""Stop gracefully at the next step boundary when a scheduler asks for it."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PASSED_ON = "LMSCALE_INTERRUPTED"  # set by the launcher for the ranks it starts after the signal
SIGNALS = (signal.SIGTERM, signal.SIGUSR1) if hasattr(signal, "SIGUSR1") else (signal.SIGTERM,)


class Interruption:
    """Records SIGTERM and SIGUSR1 while installed; the training checks `received` after each step.

    Args:
        then: called with the signal, in the handler.
    """

    def __init__(self, then: Callable[[signal.Signals], None] | None = None) -> None:
        self.received: signal.Signals | None = None
        self.then = then
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python allows no handlers."""
        if PASSED_ON in os.environ:  # before this rank was started or restarted
            self.received = signal.Signals[os.environ[PASSED_ON]]
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._record) for number in SIGNALS}

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.then is not None:
            self.then(self.received)
