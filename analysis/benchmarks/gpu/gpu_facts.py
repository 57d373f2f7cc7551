"""Versions, bf16 matrix-product rate and copy bandwidth of a GPU machine.

python analysis/benchmarks/gpu/gpu_facts.py --product 8192x8192x8192 --copy-gib 4 --record FILE
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

import torch

from analysis.benchmarks.gpu.device import median_time_s, require_device
from lmscale.cli.errors import one_line_errors
from lmscale.results import new_record, record_argument, report

FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def environment(device: torch.device) -> dict:
    """Facts that the record's environment lacks: driver, CUDA libraries and the device's properties."""
    facts = {
        "nvidia_smi": nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "has_triton": importlib.util.find_spec("triton") is not None,
        "has_apex": importlib.util.find_spec("apex") is not None,
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {
            "capability": [found.major, found.minor],
            "memory_bytes": found.total_memory,
            "num_multiprocessors": found.multi_processor_count,
            "l2_bytes": found.L2_cache_size,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def product_flops_per_s(size: tuple[int, int, int], device: torch.device, repeats: int) -> float:
    """Rate of [m, k] x [k, n] in bf16 on random values: a GPU draws less power, and so runs faster, on zeros."""
    m, n, k = size
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return 2 * m * n * k / median_time_s(lambda: torch.mm(a, b, out=out), device, repeats)


def copy_bytes_per_s(num_bytes: int, device: torch.device, repeats: int) -> float:
    """Bandwidth of a copy in device memory, bytes read plus bytes written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_time_s(lambda: target.copy_(source), device, repeats)


def product_size(text: str) -> tuple[int, int, int]:
    """Parse `MxNxK`; argparse reports a text of another form."""
    m, n, k = (int(part) for part in text.split("x"))
    return m, n, k


def nvidia_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints; None where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@one_line_errors()
def main() -> None:
    """Measure, print the rates and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", nargs="+", type=product_size, required=True, help="MxNxK")
    parser.add_argument("--copy-gib", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--record", type=record_argument, default=Path("outputs/gpu_facts.json"))
    options = parser.parse_args()
    device, name = require_device(options.accelerator)
    torch.manual_seed(options.seed)
    rates = {size: product_flops_per_s(size, device, options.repeats) for size in options.product}
    metrics = {
        f"gemm/{'x'.join(map(str, size))}": {"value": rate / 1e12, "unit": "TFLOP/s"} for size, rate in rates.items()
    }
    metrics["gemm/peak"] = {"value": max(rates.values()) / 1e12, "unit": "TFLOP/s"}
    bandwidth = copy_bytes_per_s(int(options.copy_gib * 2**30), device, options.repeats)
    metrics["copy"] = {"value": bandwidth / 1e12, "unit": "TB/s read and written"}
    config = {key: value for key, value in vars(options).items() if key != "record"}
    record = new_record("gpu_facts", "run", config, options.seed, metrics, device=name)
    record["environment"] |= environment(device)
    print(record["environment"])
    report(record, options.record)


if __name__ == "__main__":
    main()
