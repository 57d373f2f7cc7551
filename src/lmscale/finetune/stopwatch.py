"""How long the training itself took, without scoring and saving."""

import time


class Stopwatch:
    """Adds up stretches of time, by the clock and by this process's CPU.

    CPU time says on a shared machine what the clock would on a quiet one; waiting, for other ranks too, is not in it.
    """

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 0.0, 0.0
        self._since: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin a stretch."""
        self._since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """End the stretch, if one has begun."""
        if self._since is not None:
            self.wall_s += time.perf_counter() - self._since[0]
            self.cpu_s += time.process_time() - self._since[1]
        self._since = None
