"""A clock that separates the time of a step's collectives from the rest."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lmscale.parallel import communicator


class Clock:
    """Measures the seconds of a step spent in collectives; the device is synchronized before and after each.

    For an asynchronous collective, the time of starting it and of waiting for it counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.communication = device, 0.0
        self._all_reduce, self._functional = dist.all_reduce, communicator._ops

    def now(self) -> float:
        """Current time in seconds, after synchronizing the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> "Clock":
        dist.all_reduce, communicator._ops = self.timed(self._all_reduce), TimedOps(self._functional, self)
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce, communicator._ops = self._all_reduce, self._functional

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts as communication."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = function(*args, **kwargs)
            self.communication += self.now() - start
            return TimedWork(result, self) if isinstance(result, dist.Work) else result

        return timed


@dataclasses.dataclass
class TimedOps:
    """Torch's functional collectives, each of which is timed, and so is the wait for it."""

    ops: Any
    clock: Clock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The collective of this name, timed."""
        return self.clock.timed(getattr(self.ops, name))


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
