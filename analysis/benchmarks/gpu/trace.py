"""Count kernels, launches, graphs and host syncs of a traced training step."""

import statistics
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.peers.contender import Batch, make_batches
from analysis.benchmarks.peers.ours import Ours
from lmscale.planner.memory import GIB
from lmscale.results import new_record
from lmscale.runtime.accelerator import resolve_accelerator

from .device import require_device

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # prefixes of names; Triton's start with cu
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero")  # the host waits for a value; also recorded on a CPU
NUM_KERNELS_KEPT = 40


def trace(bench: BenchConfig, path: Path) -> dict:
    """Trace `steps_per_round` of our steps after the warm-up.

    Args:
        path: file of the Chrome trace (`.json.gz`).

    Returns:
        the record, with `kernels` (the longest by name, each with calls and seconds per step; on a CPU, operations
        with their self time), `syncs` (host synchronizations by name over all traced steps; the profiler may add one at
        its end), `sync_places` (the Python lines that torch warns about) and `graph_breaks` by reason.
    """
    device, name = require_device(resolve_accelerator(bench.accelerator))
    torch.set_float32_matmul_precision("medium")
    counters.clear()
    ours = Ours(bench, device, bench.precision.dtype)  # first: it sets the allocator
    (batches,) = make_batches(bench.transformer_config(), bench, 1, device)
    number = 0
    for _ in range(bench.warm_up_steps):
        ours.step(batches, number)
        number += 1
    places = _sync_places(ours, batches, number) if device.type == "cuda" else {}
    times = [_host_and_step_s(ours, batches, number + 1 + step, device) for step in range(3)]
    number += len(times)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        for step in range(number + 1, number + 1 + bench.steps_per_round):
            ours.step(batches, step)
    profiler.export_chrome_trace(str(path))
    record = _record(bench, name, profiler, places)
    for key, values in zip(("host", "step_untraced"), zip(*times, strict=True), strict=True):
        record["metrics"][key] = {"value": statistics.median(values), "unit": "s"}
    return record


def _host_and_step_s(ours: Ours, batches: list[Batch], number: int, device: torch.device) -> tuple[float, float]:
    """Seconds until the host has enqueued a step on an idle device, and until the step is done."""
    started = time.perf_counter()
    ours.step(batches, number)
    enqueued = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return enqueued - started, time.perf_counter() - started


def _sync_places(ours: Ours, batches: list[Batch], number: int) -> dict[str, int]:
    """Places where the host synchronizes in one step, by file and line, found by torch's debug mode."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            ours.step(batches, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchroniz" in str(w.message)]
    return dict(Counter(f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}" for w in found))


def _record(bench: BenchConfig, device_name: str, profiler: profile, places: dict[str, int]) -> dict:
    steps, events = bench.steps_per_round, profiler.events()
    kernels = _kernels(events)
    names = Counter(event.name for event in events if event.device_type == DeviceType.CPU)
    launches = sum(count for name, count in names.items() if name.startswith(LAUNCHES))
    syncs = {name: names[name] for name in (*SYNCS, *HOST_READS) if names[name]}
    breaks = dict(counters["graph_break"])
    busy = sum(time for _, time in kernels.values())
    span = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1e6
    metrics = {
        "step": {"value": span / steps, "unit": "s, including the profiler"},
        "kernel_time": {"value": busy / steps, "unit": "s/step"},
        "kernels": {"value": sum(count for count, _ in kernels.values()) / steps, "unit": "per step"},
        "launches": {"value": launches / steps, "unit": "per step"},
        "host_syncs": {"value": sum(names[name] for name in SYNCS) / steps, "unit": "per step"},
        "host_reads": {"value": sum(names[name] for name in HOST_READS) / steps, "unit": "per step"},
        "graphs": {"value": counters["stats"]["unique_graphs"], "unit": "compiled"},
        "graph_breaks": {"value": sum(breaks.values()), "unit": "while compiling"},
    }
    if torch.cuda.is_available():
        metrics["memory_peak"] = {"value": torch.cuda.max_memory_allocated() / GIB, "unit": "GiB"}
    record = new_record(
        f"trace_{bench.model.get('name')}", "run", bench.to_dict(), bench.seed, metrics, device=device_name
    )
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:NUM_KERNELS_KEPT]
    record["kernels"] = [
        {"name": name[:160], "calls_per_step": count / steps, "s_per_step": time / steps, "share": time / busy}
        for name, (count, time) in longest
    ]
    return record | {"syncs": syncs, "sync_places": places, "graph_breaks": breaks}


def _kernels(events: list) -> dict[str, tuple[int, float]]:
    """Calls and seconds by name: a GPU's kernels and copies or, without a GPU, the host's operations."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            found[event.name].append(event.time_range.elapsed_us())
    if not found:
        for event in events:
            found[event.name].append(event.self_cpu_time_total)
    return {name: (len(times), sum(times) / 1e6) for name, times in found.items()}
