"""Time per phase of a step (data, forward, backward, optimizer), and the memory of a rank."""

import os
import sys
import time
from collections import defaultdict
from typing import Any

import torch


class PhaseTimer:
    """Adds up the seconds spent in the phases of a step, one at a time.

    On a CPU the clock is read; on a GPU events are recorded on the stream and read once, in `read`, so that measuring
    does not make the host wait in the middle of a step.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self._passed: list[tuple[str, Any, Any]] = []  # a phase, its start and its end
        self._phase: tuple[str, Any] | None = None

    def enter(self, name: str | None) -> None:
        """End the current phase and start phase `name`; None: start none."""
        now = time.perf_counter()
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        if self._phase is not None:
            self._passed.append((*self._phase, now))
        self._phase = None if name is None else (name, now)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere to a phase."""
        self.seconds[name] += seconds

    def read(self) -> dict[str, float]:
        """Return seconds per phase since the last call; on a GPU, wait for the recorded work."""
        if self._passed and self.on_gpu:
            self._passed[-1][2].synchronize()
        for name, first, last in self._passed:
            self.seconds[name] += first.elapsed_time(last) / 1e3 if self.on_gpu else last - first
        self._passed.clear()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


def memory_in_use(device: torch.device) -> int:
    """Memory of this rank in bytes: peak of the allocator on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the BSDs KiB
