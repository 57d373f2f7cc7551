"""Training time without scoring and saving."""

import time


class Timer:
    """Accumulate wall-clock time and CPU time of this process over intervals.

    On a shared machine, CPU time approximates the wall-clock time of an idle one; it excludes waiting for other ranks.
    """

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 0.0, 0.0
        self._since: tuple[float, float] | None = None

    def start(self) -> None:
        """Start an interval."""
        self._since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Stop the current interval, if any."""
        if self._since is not None:
            self.wall_s += time.perf_counter() - self._since[0]
            self.cpu_s += time.process_time() - self._since[1]
        self._since = None
