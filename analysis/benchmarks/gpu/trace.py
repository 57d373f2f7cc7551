"""Count kernels, launches, graphs and host syncs of a traced training step, and join it with the planner's."""

import statistics
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.forecast import CARDS, cluster_of
from analysis.benchmarks.peers.contender import Batch, make_batches
from analysis.benchmarks.peers.ours import Ours
from lmscale.planner.memory import GIB
from lmscale.planner.workload import Workload
from lmscale.results import new_record
from lmscale.runtime.accelerator import resolve_accelerator

from .device import clock_metrics, require_device, sampled_clocks
from .operations import join, read_trace, work_in

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # prefixes of names; Triton's start with cu
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero")  # the host waits for a value; also recorded on a CPU
NUM_UNTRACED = 5


def trace(bench: BenchConfig, path: Path) -> dict:
    """Trace `steps_per_round` of our steps after the warm-up.

    Args:
        path: file of the Chrome trace (`.json.gz`).

    Returns:
        the record, with `operations` (`operations.join`; without a GPU the plan is the H200's), `syncs` (host
        synchronizations by name over all traced steps; the wait at the end is one), `sync_places` (the Python lines
        that torch warns about) and `graph_breaks` by reason. Clocks are those of untraced steps.
    """
    device, name = require_device(resolve_accelerator(bench.accelerator))
    torch.set_float32_matmul_precision("medium")
    counters.clear()
    ours = Ours(bench, device)  # first: it sets the allocator
    (batches,) = make_batches(bench.transformer_config(), bench, 1, device)
    number = 0
    for _ in range(bench.warm_up_steps):
        ours.step(batches, number)
        number += 1
    places = _sync_places(ours, batches, number) if device.type == "cuda" else {}
    with sampled_clocks(device) as samples:
        times = [_host_and_step_s(ours, batches, number + 1 + step, device) for step in range(NUM_UNTRACED)]
    number += len(times)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, record_shapes=True) as profiler:
        for step in range(number + 1, number + 1 + bench.steps_per_round):
            ours.step(batches, step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))
    record = _record(bench, name, read_trace(path), places)
    for key, values in zip(("host", "step_untraced"), zip(*times, strict=True), strict=True):
        record["metrics"][key] = {"value": statistics.median(values), "unit": "s"}
    record["metrics"] |= {f"clocks/{key}": entry for key, entry in clock_metrics(samples).items()}
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


def _record(bench: BenchConfig, device_name: str, events: list[dict], places: dict[str, int]) -> dict:
    steps = bench.steps_per_round
    works = work_in(events)
    names = Counter(event["name"] for event in events)
    launches = sum(count for name, count in names.items() if name.startswith(LAUNCHES))
    syncs = {name: names[name] for name in (*SYNCS, *HOST_READS) if names[name]}
    breaks = dict(counters["graph_break"])
    span = (max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)) / 1e6
    metrics = {
        "step": {"value": span / steps, "unit": "s, including the profiler"},
        "kernel_time": {"value": sum(work.seconds for work in works) / steps, "unit": "s/step"},
        "kernels": {"value": len(works) / steps, "unit": "per step"},
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
    record["operations"] = join(events, _job(bench), cluster_of(_card(device_name)), steps)
    return record | {"syncs": syncs, "sync_places": places, "graph_breaks": breaks}


def _job(bench: BenchConfig) -> Workload:
    sizes = bench.micro_batch_size, bench.step_sequences, bench.length, bench.precision.dtype
    teacher = None if bench.teacher is None else bench.transformer_config(of_teacher=True)
    return Workload(bench.transformer_config(), *sizes, compiles=bench.compiles, teacher=teacher)


def _card(device_name: str) -> str:
    return next((card for card in CARDS if card.upper() in device_name), "h200")
