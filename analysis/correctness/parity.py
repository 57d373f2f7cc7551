"""Train a tiny GPT and BERT at several layouts in fp64 and compare the losses and gradient norms with one process.

    python analysis/correctness/parity.py                                 # 3 steps
    python analysis/correctness/parity.py --steps 300 --record FILE       # whether rounding errors grow

Sums in another order are the only reason for differences: dropout masks depend on sample and position alone. One
process accumulates two micro-batches per step and two data ranks take one each. Exit code 1: a bound was exceeded.
"""

import argparse
import csv
import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.running import positive, run_python
from lmscale.results import new_record, record_argument, write_record

LAYOUTS = ((2, 1), (4, 1), (1, 2), (2, 2))  # tp_size, dp_size
MODEL = ("model.num_layers=2", "model.hidden_size=24", "model.num_attention_heads=4", "model.hidden_dropout=0.2")
MODEL += (
    "model.initializer_std=0.02",
    "model.attention_dropout=0",
    "model.max_position_embeddings=33",
    "data.seq_length=33",
)
RUN = ("tokenizer.vocab_size=600", "precision=fp64", "micro_batch_size=4", "global_batch_size=8", "optimizer.lr=1e-3")
RUN += ("schedule=constant", "schedule.warmup_steps=1", "trainer.accelerator=cpu", "trainer.num_threads=1")
RUN += ("trainer.validate_every_steps=0", "trainer.num_validation_samples=4", "trainer.progress_bar=false")
RUN += ("checkpoint.save_every_steps=0", "checkpoint.save_last=false", "logger.tensorboard=false")
BOUNDS = {"train/loss": 1e-12, "grad_norm": 1e-9}  # relative; measured over 300 steps: 4e-16, and Adam magnifies norms
SHOWN = (1, 3, 10, 30, 100, 300, 1000)  # steps up to which the largest difference of the loss is recorded


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each step."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        return [{name: float(row[name]) for name in BOUNDS} for row in csv.DictReader(file)]


def compare(plain: list[dict[str, float]], other: list[dict[str, float]], name: str) -> dict[int, float]:
    """Largest relative difference up to each step of `SHOWN` and up to the last; infinite for a non-finite value."""
    gaps = [abs(b[name] - a[name]) / abs(a[name]) for a, b in zip(plain, other, strict=True)]
    gaps = [gap if math.isfinite(gap) else math.inf for gap in gaps]
    return {step: max(gaps[:step]) for step in sorted({*SHOWN, len(gaps)}) if step <= len(gaps)}


def train(family: str, tp_size: int, dp_size: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """The steps of one run."""
    run_dir = folder / f"{family}_tp{tp_size}_dp{dp_size}"
    layout = (f"parallel.tp_size={tp_size}", f"parallel.dp_size={dp_size}", f"trainer.max_steps={steps}")
    with open(folder / "log", "a", encoding="utf-8") as log:
        words = (f"model={family}_tiny", *MODEL, *RUN, *layout, f"hydra.run.dir={run_dir}")
        run_python("src/train.py", *words, stdout=log)
    return read_steps(run_dir)


def main() -> int:
    """Train the runs at every layout, print the differences and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps (3)")
    parser.add_argument("--record", type=record_argument)
    options = parser.parse_args()
    metrics, failed = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for family in ("gpt", "bert"):
            plain = train(family, 1, 1, options.steps, Path(folder))
            for name, step in (("first", plain[0]), ("last", plain[-1])):
                metrics[f"{family}/fp64/hidden/{name}_loss"] = {"value": step["train/loss"], "unit": "nats/token"}
            for tp_size, dp_size in LAYOUTS:
                other = train(family, tp_size, dp_size, options.steps, Path(folder))
                case = f"{family}/fp64/hidden/tp{tp_size}_dp{dp_size}"
                for step, gap in compare(plain, other, "train/loss").items():
                    metrics[f"{case}/{step}_steps"] = {"value": gap, "unit": "relative"}
                worst = {name: compare(plain, other, name)[options.steps] for name in BOUNDS}
                metrics[f"{case}/grad_norm"] = {"value": worst["grad_norm"], "unit": "relative"}
                fails = any(worst[name] > bound for name, bound in BOUNDS.items())
                failed += fails
                shown = ", ".join(f"{name} {gap:.1e} (at most {BOUNDS[name]:g})" for name, gap in worst.items())
                print(f"{'FAIL' if fails else 'pass'}  {case}: largest difference of {shown}", flush=True)
    if options.record is not None:
        config = {"overrides": [*MODEL, *RUN], "steps": options.steps}
        record = new_record("loss_curves", "run", config, None, metrics, device="cpu", steps=[0, options.steps])
        write_record(record, options.record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
