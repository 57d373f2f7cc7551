"""A clock that separates the time of a step's collectives from the rest."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lmscale.parallel import collectives


class Clock:
    """Measures the seconds of a step spent in collectives; the device is synchronized before and after each.

    For an asynchronous collective, the time of starting it and of waiting for it counts.
    """

    PLACES = ((dist, "all_reduce"), (collectives, "_all_gather_tensor"), (collectives, "_reduce_scatter_tensor"))

    def __init__(self, device: torch.device) -> None:
        self.device, self.communication = device, 0.0
        self._originals = [getattr(module, name) for module, name in self.PLACES]

    def now(self) -> float:
        """Current time in seconds, after synchronizing the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> "Clock":
        for (module, name), original in zip(self.PLACES, self._originals, strict=True):
            setattr(module, name, self._timed(original))
        return self

    def __exit__(self, *error: object) -> None:
        for (module, name), original in zip(self.PLACES, self._originals, strict=True):
            setattr(module, name, original)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = function(*args, **kwargs)
            self.communication += self.now() - start
            return None if result is None else TimedWork(result, self)

        return timed


@dataclasses.dataclass
class TimedWork:
    """A started asynchronous collective, whose waiting time counts."""

    work: dist.Work
    clock: Clock

    def wait(self) -> None:
        """Wait for the collective and add the waiting time."""
        start = self.clock.now()
        self.work.wait()
        self.clock.communication += self.clock.now() - start
