"""The requested device of a measurement, the time of a function on it, and its clocks meanwhile."""

import importlib.util
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

PERIOD_S = 0.1
CLOCKS = 1, 2  # SM and memory; these and the bits of reasons are those of NVIDIA's nvml.h
REASONS = {"power_cap": 0x4, "hardware": 0x8, "thermal_software": 0x20, "thermal_hardware": 0x40, "power_brake": 0x80}


class Sample(NamedTuple):
    """Clocks in MHz, power in W, temperature in degrees Celsius, and why the clocks are lowered, in bits."""

    time_s: float
    sm_mhz: int
    memory_mhz: int
    power_w: float
    celsius: int
    reasons: int


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


@contextmanager
def sampled_clocks(device: torch.device) -> Iterator[list[Sample]]:
    """Within it the list grows by one sample of the device every 100 ms; where that is impossible it stays as it is."""
    samples: list[Sample] = []
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        yield samples
        return
    import pynvml

    ended, uuid = threading.Event(), torch.cuda.get_device_properties(device).uuid

    def sample_all() -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        while not ended.wait(PERIOD_S):
            sm, memory = (pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in CLOCKS)
            power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3  # it measures milliwatts
            celsius = pynvml.nvmlDeviceGetTemperature(handle, 0)  # of the chip
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            samples.append(Sample(time.perf_counter(), sm, memory, power, celsius, reasons))
        pynvml.nvmlShutdown()

    def sample() -> None:
        try:
            sample_all()
        except pynvml.NVMLError as error:  # no library in the container, or a GPU that does not tell
            print(f"note: the clocks are not measured: {error}", flush=True)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def clock_metrics(samples: list[Sample], start: float = -math.inf, end: float = math.inf) -> dict[str, dict]:
    """Metrics of the samples between two times of `time.perf_counter`; none if there are no samples.

    Returns:
        medians of clocks and power, the highest temperature, and the share of samples with each of `REASONS`.
    """
    found = [sample for sample in samples if start <= sample.time_s <= end]
    if not found:
        return {}
    units = {"sm_mhz": "MHz", "memory_mhz": "MHz", "power_w": "W"}
    metrics = {n: {"value": statistics.median(getattr(s, n) for s in found), "unit": u} for n, u in units.items()}
    metrics["celsius"] = {"value": max(sample.celsius for sample in found), "unit": "degrees"}
    for name, bit in REASONS.items():
        share = sum(bool(sample.reasons & bit) for sample in found) / len(found)
        metrics[f"lowered_by_{name}"] = {"value": share, "unit": "of samples"}
    return metrics
