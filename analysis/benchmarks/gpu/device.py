"""The requested device of a measurement, and the time of a function on it."""

import statistics
import time
from collections.abc import Callable

import torch


def require_device(accelerator: str) -> tuple[torch.device, str]:
    """Return the device and its name.

    Args:
        accelerator: cpu or gpu.

    Raises:
        ValueError: `gpu` on a machine without one; the CPU is never used instead.
    """
    if accelerator == "cpu":
        return torch.device("cpu"), "cpu"
    if not torch.cuda.is_available():
        raise ValueError("`accelerator` must be cpu if torch finds no GPU, but is gpu")
    return torch.device("cuda"), torch.cuda.get_device_name()


def median_time_s(function: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """Median seconds per call, after `warm_up` untimed calls.

    On a GPU each call is enclosed by two CUDA events, and the host synchronizes only after the last one. The time is
    therefore the device's and excludes launches, provided that calls take longer than their launches.
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
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3  # events measure milliseconds
