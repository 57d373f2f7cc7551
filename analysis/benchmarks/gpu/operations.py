"""Join the kernels of a traced step with the planner's operations: modelled and measured launches, time and rates.

A trace is a file of torch.profiler with shapes. Its events are joined by what the host was in when it launched a
kernel: an operator whose input shapes are those of a matrix product, an attention core, a compiled layer, the loss, the
gradient buffer or the optimizer.
"""

import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmscale.config import Layout
from lmscale.config.cluster import Cluster
from lmscale.planner.layer_operations import LayerCounts
from lmscale.planner.operation import Operation, Product
from lmscale.planner.params import stage_placements
from lmscale.planner.step_operations import step_operations
from lmscale.planner.workload import Workload

Key = tuple  # phase and kind of work, of a product also its shape
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_HOST = {"cpu_op", "user_annotation"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}  # and the place of the first operand
ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention", "aten::bmm")
GRAPH = "## Call CompiledFxGraph"
TYPE_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2}
TYPE_BYTES |= {"bool": 1, "unsigned char": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}
LOSS = ("loss", "logits", "sum of the chunks")
NUM_KERNELS = 8  # kept per row


@dataclass(frozen=True)
class Work:
    """A kernel or copy of a GPU with the host's events around its launch, outermost first; in a trace without a GPU an
    operator, itself the last of them, with the time that it spent outside others."""

    name: str
    seconds: float
    hosts: tuple[dict, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensors that a Triton kernel takes, each once; 0 for another kernel, whose operator does not tell."""
        if not self.hosts or not self.hosts[-1]["name"].startswith("triton_"):
            return 0
        args = self.hosts[-1]["args"]
        found = zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=True)
        return sum(math.prod(dims) * TYPE_BYTES.get(kind, 0) for dims, kind in found if dims)


def read_trace(path: Path) -> list[dict]:
    """What host and device did, by a Chrome trace: `name`, `cat`, `tid`, `ts` and `dur` in microseconds, `args`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    return [event for event in found if event["ph"] == "X" and event.get("cat") in ON_DEVICE | ON_HOST | LAUNCHES]


def work_in(events: list[dict]) -> list[Work]:
    """What a GPU computed or copied or, without a GPU, the host's operators."""
    around = list(_around(events))
    on_device = [event for event in events if event["cat"] in ON_DEVICE]
    if on_device:
        launched = {event["args"].get("correlation"): hosts for event, hosts in around if event["cat"] in LAUNCHES}
        return [Work(e["name"], e["dur"] / 1e6, launched.get(e["args"].get("correlation"), ())) for e in on_device]
    own = {id(event): event["dur"] for event, _ in around}
    for event, hosts in around:
        if hosts:
            own[id(hosts[-1])] -= event["dur"]
    return [Work(event["name"], own[id(event)] / 1e6, (*hosts, event)) for event, hosts in around]


def _around(events: list[dict]) -> Iterator[tuple[dict, tuple[dict, ...]]]:
    """Events of the host, each with those of its thread that it lies within."""
    threads = defaultdict(list)
    for event in events:
        if event["cat"] in ON_HOST | LAUNCHES:
            threads[event["tid"]].append(event)
    for found in threads.values():
        hosts: list[dict] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            while hosts and event["ts"] >= hosts[-1]["ts"] + hosts[-1]["dur"]:
                hosts.pop()
            yield event, tuple(hosts)
            if event["cat"] in ON_HOST:
                hosts.append(event)


def join(events: list[dict], job: Workload, cluster: Cluster, num_steps: int) -> list[dict]:
    """Rows of equal work, those that took longest first.

    Args:
        events: of `num_steps` whole steps of `job` on one device.

    Returns:
        per row the phase, what it is, the operations, per step the launches and seconds, both measured and modelled,
        TFLOP and GB as the planner counts them, the rates that these give in the measured time, and the longest
        kernels, Triton's with the GB of their tensors. A row that the planner lacks has no operations, one that the
        trace lacks no launches.
    """
    micro_batches = num_steps * job.num_micro_batches(Layout())
    graphs = Counter(event["name"] for event in events if event["name"].startswith(GRAPH))
    of_layers = {name for name, count in graphs.items() if count > micro_batches}
    modelled = _operations(job)
    measured: dict[Key, list[Work]] = defaultdict(list)
    for work in work_in(events):
        measured[_key_of_work(work, of_layers, modelled)].append(work)
    rows = [
        _row(key, modelled.get(key, []), measured.get(key, []), job, cluster, num_steps)
        for key in dict.fromkeys((*modelled, *measured))
    ]
    return sorted(rows, key=lambda row: -row["s"])


def describe(rows: list[dict]) -> str:
    """A table of the rows, one per line: each figure as measured, and beside launches and times the modelled one."""
    titles = "phase", "work", "launches", "plan", "ms", "plan", "TFLOP/s", "GB/s", "operations"
    lines = [titles]
    for row in rows:
        counts = f"{row['launches']:.0f}", row["launches_modelled"], f"{1e3 * row['s']:.2f}"
        rates = f"{1e3 * row['s_modelled']:.2f}", f"{row['tflops']:.0f}", f"{row['gb_s']:.0f}"
        lines.append((row["phase"], row["work"], *counts, *rates, ", ".join(row["operations"])[:60]))
    widths = 10, 20, 9, 7, 9, 9, 8, 7, 0
    return "\n".join("".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def _operations(job: Workload) -> dict[Key, list[Operation]]:
    """The planner's operations by the keys of what computes them.

    The rows of BERT's heads and logits are the masked words, which differ by batch: their products have no shape here.
    """
    layer_names = set()
    for placement in set(stage_placements(job.config, Layout(), 0)):
        layer = LayerCounts(job, Layout(), placement)
        layer_names |= {operation.name for operation in (*layer.forward("forward"), *layer.backward())}
    found: dict[Key, list[Operation]] = defaultdict(list)
    for operation in step_operations(job, Layout()):
        phase = "backward" if operation.phase == "recomputation" else operation.phase
        key: Key = phase, "around the layers"
        if operation.work is not None and re.match("attention (?!projection)", operation.name):
            key = phase, "attention"  # a fused core, or the batched products of an exact one
        elif isinstance(operation.work, Product) and (job.config.traits.is_causal or operation.name in layer_names):
            m, n = operation.work.m, operation.work.n
            key = phase, "product", *sorted((m, n)), operation.flops // (2 * m * n)
        elif phase in ("optimizer", "gradients"):
            key = phase, "all"
        elif operation.name in layer_names:
            key = phase, "in the layers"
        elif operation.name.startswith(LOSS):
            key = phase, "loss"
        found[key].append(operation)
    return found


def _key_of_work(work: Work, of_layers: set[str], modelled: Container[Key]) -> Key:
    names = [host["name"] for host in work.hosts]
    phase = "backward" if any(name.startswith("autograd::engine") for name in names) else "forward"
    if any(name.startswith("Optimizer.step") for name in names):
        return "optimizer", "all"
    if any("AccumulateGrad" in name for name in names):
        return "gradients", "all"
    for host in reversed(work.hosts):
        if host["name"].startswith(ATTENTION):
            return phase, "attention"
        if host["name"] in PRODUCTS:
            first = PRODUCTS[host["name"]]
            (m, k), (_, n) = host["args"]["Input Dims"][first : first + 2]
            key = phase, "product", *sorted((m, n)), k
            if key in modelled or of_layers.intersection(names):
                return key
    if any(name.startswith("_LinearCrossEntropy") for name in names):
        return phase, "loss"
    return phase, "in the layers" if of_layers.intersection(names) else "around the layers"


def _row(
    key: Key, operations: list[Operation], works: list[Work], job: Workload, cluster: Cluster, num_steps: int
) -> dict:
    phase, what, *shape = key
    seconds = sum(work.seconds for work in works) / num_steps
    tera = sum(operation.count * operation.flops for operation in operations) / 1e12
    giga = sum(operation.count * operation.num_bytes for operation in operations) / 1e9
    kernels: dict[str, list[Work]] = defaultdict(list)
    for work in works:
        kernels[work.name[:160]].append(work)
    longest = sorted(kernels.items(), key=lambda item: -sum(work.seconds for work in item[1]))[:NUM_KERNELS]
    return {
        "phase": phase,
        "work": "x".join(map(str, shape)) or what,
        "operations": list(dict.fromkeys(operation.name for operation in operations)),
        "launches": len(works) / num_steps,
        "launches_modelled": sum(operation.count * operation.launches for operation in operations),
        "s": seconds,
        "s_modelled": sum(o.seconds(cluster, job.dtype) + o.launch_s(cluster) for o in operations),
        "tflop": tera,
        "gb": giga,
        "tflops": tera / seconds if works else 0.0,
        "gb_s": giga / seconds if works else 0.0,
        "kernels": [
            {
                "name": name,
                "launches": len(found) / num_steps,
                "s": sum(work.seconds for work in found) / num_steps,
                "gb": sum(work.num_bytes for work in found) / 1e9 / num_steps,
            }
            for name, found in longest
        ],
    }
