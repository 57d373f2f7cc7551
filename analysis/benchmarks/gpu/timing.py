"""Time of one function on a device."""

import statistics
import time
from collections.abc import Callable

import torch


def median_time_s(function: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """Median time of a call in seconds, after `warm_up` calls that are not timed.

    On a GPU each call lies between two CUDA events, and the host waits only after the last one: the time is the
    device's, without the launch, as long as calls take longer than their launches.
    """
    for _ in range(warm_up):
        function()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize(device)
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3  # events count milliseconds
