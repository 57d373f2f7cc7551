"""Time and bandwidth of the collectives that training uses, by message size, over the GPUs of this host.

    python analysis/benchmarks/gpu/collective_bandwidth.py --ranks 8 --record FILE
    python analysis/benchmarks/gpu/collective_bandwidth.py --ranks 2 --accelerator cpu --mib 0.25 1      # gloo

The bus bandwidth is what each rank sends (and receives) per second under a ring: 2 (p - 1) / p of an all-reduced
tensor, (p - 1) / p of a gathered or scattered one. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

import torch
import torch.distributed as dist

from analysis.benchmarks.gpu.device import median_time_s, require_device
from analysis.ranks import on_ranks
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, record_argument, report

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def bus_bytes(collective: str, num_bytes: int, ranks: int) -> float:
    """Bytes that each rank sends for a tensor of `num_bytes`, the whole one."""
    share = (ranks - 1) / ranks
    return (2 * share if collective == "all_reduce" else share) * num_bytes


def run_once(collective: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    """One collective; `part`, 1/p of `whole`, is the input of a gather and the output of a scatter."""
    if collective == "all_reduce":
        dist.all_reduce(whole)
    elif collective == "all_gather":
        dist.all_gather_into_tensor(whole, part)
    else:
        dist.reduce_scatter_tensor(part, whole)


def time_collectives(rank: int, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Seconds and bytes sent of every collective and size, on one rank."""
    device = torch.device("cuda", rank) if options.accelerator == "gpu" else torch.device("cpu")
    found = {}
    for collective in COLLECTIVES:
        for mib in options.mib:
            elements = max(1, int(mib * 2**20 / 2 / options.ranks)) * options.ranks
            whole = torch.zeros(elements, dtype=torch.bfloat16, device=device)
            part = torch.zeros(elements // options.ranks, dtype=torch.bfloat16, device=device)
            seconds = median_time_s(lambda c=collective, w=whole, p=part: run_once(c, w, p), device, options.repeats)
            found[f"{collective}/{mib:g}_mib"] = (seconds, bus_bytes(collective, 2 * elements, options.ranks))
    return found


def measure(options: argparse.Namespace) -> dict[str, dict]:
    """Metrics of every collective and size.

    Raises:
        ValueError: fewer than 2 ranks, or more than there are GPUs.
    """
    require_device(options.accelerator)
    if options.accelerator == "gpu" and options.ranks > torch.cuda.device_count():
        raise ValueError(f"`ranks` must be at most the {torch.cuda.device_count()} GPUs, but is {options.ranks}")
    if options.ranks < 2:
        raise ValueError(f"`ranks` must be at least 2, but is {options.ranks}")
    found = on_ranks(options.ranks, time_collectives, options, on_gpu=options.accelerator == "gpu")
    metrics = {}
    for name, (seconds, sent) in found[0].items():
        metrics[f"{name}/time"] = {"value": seconds, "unit": "s"}
        metrics[f"{name}/bus_bandwidth"] = {"value": sent / seconds / 1e9, "unit": "GB/s"}
    return metrics


@one_line_errors()
def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 4, 16, 64, 256], help="sizes of the whole tensor")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--record", type=record_argument, help="where the record goes; nowhere by default")
    options = parser.parse_args()
    metrics = measure(options)
    config = {key: value for key, value in vars(options).items() if key != "record"}
    device = torch.cuda.get_device_name() if options.accelerator == "gpu" else "cpu"
    report(new_record("collective_bandwidth", "run", config, None, metrics, device=device), options.record)


if __name__ == "__main__":
    main()
