"""Rows of `analysis/bench_gpu.sh`: a record's figure beside the one that is required.

python analysis/bench_gpu_rows.py row TITLE RECORD METRIC LEAST
python analysis/bench_gpu_rows.py keep RUN_FOLDER RECORD       # a run's record, with the curve of its loss
python analysis/bench_gpu_rows.py seeds RECORD_FP8 RECORD_BF16 RECORD_BF16 ...
"""

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

from lmscale.results import write_record

LAST_STEPS = 50  # of a curve, whose mean stands for where the run has come to


def row(title: str, record: Path, metric: str, least: float) -> str:
    """One line: what was measured, what is required, and whether it is reached."""
    entry = read(record)["metrics"][metric]
    verdict = "reached" if entry["value"] is not None and entry["value"] >= least else "NOT REACHED"
    return f"{title:<55} {entry['value']:.4g} {entry['unit']} (required: {least:g})  {verdict}"


def keep(folder: Path, path: Path) -> str:
    """Write a run's record with its first and last losses and what the loss fell by; returns its path."""
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        losses = [float(line["train/loss"]) for line in csv.DictReader(file) if line["train/loss"]]
    record = read(folder / "record.json")
    last = statistics.mean(losses[-LAST_STEPS:])
    figures = {
        "train/loss_first": losses[0],
        "train/loss_fall": losses[0] - losses[-1],
        "train/loss_mean_of_last": last,
    }
    record["metrics"] |= {name: {"value": value, "unit": "nats/token"} for name, value in figures.items()}
    record["train_losses"] = losses
    write_record(record, path)
    return f"record: {path}"


def seeds(fp8: Path, bf16: list[Path]) -> str:
    """Whether float8's loss lies among those of bf16: no further from their mean than two standard deviations."""
    found = read(fp8)["metrics"]["train/loss_mean_of_last"]["value"]
    others = [read(path)["metrics"]["train/loss_mean_of_last"]["value"] for path in bf16]
    mean, spread = statistics.mean(others), statistics.stdev(others)
    verdict = "reached" if abs(found - mean) <= 2 * spread else "NOT REACHED"
    return (
        f"gpt_2.5b, mean loss of the last {LAST_STEPS} of 200 steps: fp8 {found:.4f}, bf16 {mean:.4f} +- {spread:.4f} "
        f"over {len(others)} seeds (required: within two standard deviations)  {verdict}"
    )


def read(path: Path) -> dict:
    """A record."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("row")
    one.add_argument("title")
    one.add_argument("record", type=Path)
    one.add_argument("metric")
    one.add_argument("least", type=float)
    kept = commands.add_parser("keep")
    kept.add_argument("folder", type=Path)
    kept.add_argument("record", type=Path)
    compared = commands.add_parser("seeds")
    compared.add_argument("fp8", type=Path)
    compared.add_argument("bf16", type=Path, nargs="+")
    args = parser.parse_args()
    try:
        if args.command == "row":
            print(row(args.title, args.record, args.metric, args.least))
        elif args.command == "keep":
            print(keep(args.folder, args.record))
        else:
            print(seeds(args.fp8, args.bf16))
    except FileNotFoundError as error:
        sys.exit(f"not measured yet: {error.filename} is missing")


if __name__ == "__main__":
    main()
