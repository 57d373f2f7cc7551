"""Sustained rates of the matrix products of our training steps, in bf16 and in float8, with the clocks meanwhile.

python analysis/benchmarks/gpu/products.py --step gpt_1.2b:32:bf16 gpt_2.5b:8:fp8 --record FILE
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

import torch

from analysis.benchmarks.forecast import cluster_of, plan_of
from analysis.benchmarks.gpu.device import clock_metrics, median_time_s, require_device, sampled_clocks
from lmscale.cli.errors import one_line_errors
from lmscale.config import Layout
from lmscale.planner.operation import Product
from lmscale.planner.step_operations import step_operations
from lmscale.results import new_record, record_argument, report

LEAST_SHARE = 0.005  # of a step's FLOPs; smaller products are left out
TRANSPOSED = {"gradient of the input": "nn", "gradient of the weight": "tn"}  # as cuBLAS is called; else nt
KINDS = {"bf16": ("bf16",), "fp8": ("bf16", "fp8_fast", "fp8_wide")}  # fast, or wide, accumulation
PERIOD_S = 0.05  # about, of products between two looks at the time


class Shape(NamedTuple):
    """A product [m, k] x [k, n] and which operands are stored transposed."""

    m: int
    n: int
    k: int
    transposed: str
    float8: bool

    @classmethod
    def of_step(cls, text: str) -> dict["Shape", list[str]]:
        """The shapes of `model:micro_batch_size:precision`, for example `gpt_1.2b:32:bf16`, and their operations.

        Raises:
            ValueError: the text has another form.
        """
        model, b, dtype = text.split(":")
        operations = step_operations(plan_of(model, int(b), dtype, cluster_of("h200")).job, Layout())
        least = LEAST_SHARE * sum(operation.count * operation.flops for operation in operations)
        found: dict[Shape, list[str]] = {}
        for name, work, flops, count in ((o.name, o.work, o.flops, o.count) for o in operations):
            if isinstance(work, Product) and count * flops >= least:
                transposed = TRANSPOSED.get(name.rpartition(", ")[2], "nt")
                shape = cls(work.m, work.n, flops // (2 * work.m * work.n), transposed, work.float8)
                found.setdefault(shape, []).append(name)
        return found


def make_product(shape: Shape, kind: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """The product on random values; float8's operands are laid out as its kernels require, gradients in e5m2."""
    m, n, k, transposed, _ = shape
    if kind == "bf16":
        a, b = (torch.randn(size, device=device).bfloat16() for size in ((m, k), (n, k)))
        a = a.t().contiguous().t() if transposed[0] == "t" else a
        b = b.t() if transposed[1] == "t" else b.t().contiguous()
        return partial(torch.mm, a, b, out=torch.empty(m, n, dtype=torch.bfloat16, device=device))
    types = torch.float8_e4m3fn if transposed == "nt" else torch.float8_e5m2, torch.float8_e4m3fn
    sizes = (m, k), (n, k)
    a, b = (torch.randn(size, device=device).to(dtype) for size, dtype in zip(sizes, types, strict=True))
    one = torch.ones((), device=device)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": kind == "fp8_fast"}
    return partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, **options)


def sustained_s(product: Callable[[], torch.Tensor], device: torch.device, seconds: float) -> tuple[float, float]:
    """Seconds per call at first, and while it has run for `seconds`: the median of the second half."""
    first = median_time_s(product, device, 10)
    calls, times, started = max(1, int(PERIOD_S / first)), [], time.perf_counter()
    while (now := time.perf_counter()) < started + seconds or not times:
        for _ in range(calls):
            product()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - now) / calls)
    return first, statistics.median(times[len(times) // 2 :])


@one_line_errors()
def main() -> None:
    """Measure, print the rates and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", nargs="+", required=True, help="model:micro_batch_size:precision")
    parser.add_argument("--seconds", type=float, default=10.0, help="per product")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--record", type=record_argument, default=Path("outputs/products.json"))
    options = parser.parse_args()
    device, name = require_device(options.accelerator)
    torch.manual_seed(options.seed)
    metrics, clocks, computed = {}, {}, {}
    with sampled_clocks(device) as samples:
        for step in options.step:
            for shape, names in Shape.of_step(step).items():
                case = f"{step.split(':')[0]}/{shape.m}x{shape.n}x{shape.k}_{shape.transposed}"
                computed[case] = names
                for kind in KINDS["fp8" if shape.float8 else "bf16"]:
                    started, flops = time.perf_counter(), 2 * shape.m * shape.n * shape.k
                    times = sustained_s(make_product(shape, kind, device), device, options.seconds)
                    for when, seconds in zip(("first", "sustained"), times, strict=True):
                        rate = {"value": flops / seconds / 1e12, "unit": "TFLOP/s"}
                        metrics[f"{case}/{kind}/{when}"] = rate
                    half = (started + time.perf_counter()) / 2
                    clocks[f"{case}/{kind}"] = clock_metrics(samples, start=half)
    config = {key: value for key, value in vars(options).items() if key != "record"}
    record = new_record("products", "run", config, options.seed, metrics, device=name)
    report(record | {"clocks": clocks, "operations": computed}, options.record)


if __name__ == "__main__":
    main()
