"""Time torch's attention backends at the shapes of the paper's models, forward and backward, with and without dropout.

python analysis/benchmarks/gpu/attention_backends.py --shape gpt_1.2b:16:16:1024:96 --record FILE
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

import torch

from analysis.benchmarks.gpu.attention import BACKENDS, AttentionShape, relative_error, time_backends
from analysis.benchmarks.gpu.device import require_device
from lmscale.results import new_record, record_argument, write_record


def measure(options: argparse.Namespace) -> dict:
    """Measure all shapes, dropouts and backends; for a refused input the record has torch's reason."""
    device, name = require_device(options.accelerator)
    torch.manual_seed(options.seed)
    metrics, refused = {}, {}
    for shape in map(AttentionShape.parse, options.shape):
        for dropout in (0.0, options.dropout):
            case = f"{shape.name}/dropout_{dropout:g}"
            times, reasons = time_backends(shape, options.backends, dropout, device, options.rounds, options.repeats)
            metrics |= {f"{case}/{backend}": {"value": time, "unit": "s"} for backend, time in times.items()}
            refused |= {f"{case}/{backend}": reason for backend, reason in reasons.items()}
            if dropout == 0.0:
                for backend in times:
                    error = relative_error(shape, backend, device)
                    metrics[f"{shape.name}/error/{backend}"] = {"value": error, "unit": "relative"}
    config = {key: value for key, value in vars(options).items() if key != "record"}
    return new_record("attention_backends", "run", config, options.seed, metrics, device=name) | {"refused": refused}


def main() -> None:
    """Measure, print the times and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", required=True, help="name:b:n:s:d")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which the backends alternate")
    parser.add_argument("--repeats", type=int, default=10, help="calls per round and backend")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--record", type=record_argument, default=Path("outputs/attention_backends.json"))
    options = parser.parse_args()
    try:
        record = measure(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    write_record(record, options.record)
    for key, entry in record["metrics"].items():
        if entry["value"] is None:
            value = entry["non_finite"]
        else:
            value = f"{1e3 * entry['value']:.4g} ms" if entry["unit"] == "s" else f"{entry['value']:.2g}"
        print(f"{key:<44} {value}")
    for key, reason in record["refused"].items():
        print(f"{key:<44} refused: {reason}")


if __name__ == "__main__":
    main()
