"""Compare the loss curves of whole runs at several layouts with one process's, in fp64.

    python analysis/correctness/loss_curves.py          # 300 steps; some minutes

The parity check bounds every tensor of a few steps; this one shows whether rounding errors grow over a longer run. The
runs have hidden dropout. Writes a record with the largest difference up to some steps.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.correctness.parity_grid import (
    ARCHITECTURES,
    ONE_PROCESS,
    SEED,
    Case,
    layout_name,
    make_layouts,
    make_run,
    prepare_all,
    run_folders,
    train_all,
)
from lmscale.results import new_record, record_argument, write_record

RECORD = Path(__file__).with_name("records") / "loss_curves_cpu.json"
SHOWN = (1, 3, 10, 30, 100, 300, 1000)  # steps up to which the largest difference is recorded


def read_losses(run_dir: Path) -> list[float]:
    """Training losses of a run by step, in nats per token."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


def compare(plain: list[float], other: list[float]) -> dict[int, float]:
    """Largest relative difference of the losses up to each step of `SHOWN` and up to the last."""
    gaps = [abs(b - a) / a for a, b in zip(plain, other, strict=True)]
    return {step: max(gaps[:step]) for step in sorted({*SHOWN, len(gaps)}) if step <= len(gaps)}


def main() -> int:
    """Train the runs at every layout, print the differences and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (300)")
    parser.add_argument("--record", type=record_argument, default=RECORD)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"`--steps` must be at least 1, but is {options.steps}")
    cases = [Case(family, "fp64", "hidden") for family in ARCHITECTURES]
    layouts = make_layouts([1, 2, 4], [1, 2], 4)
    metrics = {}
    with run_folders(None) as root:
        train_all(prepare_all(cases, layouts, options.steps, root, None), None)
        for case in cases:
            plain = read_losses(root / case.name / layout_name(ONE_PROCESS))
            for name, loss in (("first", plain[0]), ("last", plain[-1])):
                metrics[f"{case.name}/{name}_loss"] = {"value": loss, "unit": "nats/token"}
            print(f"{case.name}: loss {plain[0]:.3f} to {plain[-1]:.3f}; largest relative difference up to a step:")
            for layout in layouts:
                gaps = compare(plain, read_losses(root / case.name / layout_name(layout)))
                print(f"  {layout_name(layout)}  " + "  ".join(f"{step}: {gap:.1e}" for step, gap in gaps.items()))
                for step, gap in gaps.items():
                    metrics[f"{case.name}/{layout_name(layout)}/{step}_steps"] = {"value": gap, "unit": "relative"}
    run = make_run(cases[0], ONE_PROCESS, options.steps, Path("runs")).to_dict()
    record = new_record("loss_curves", "run", run, SEED, metrics, device="cpu", steps=[0, options.steps])
    write_record(record, options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
