"""Measure how long training waits for a checkpoint written in the foreground and in the background.

    python analysis/benchmarks/checkpoint_cost.py

Trains the same GPT (about 50 M parameters) alternately with `checkpoint.async` off and on, saving every few steps, and
reads from metrics.csv how long the steps waited. Prints the medians and writes a record.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.running import run_python
from lmscale.checkpoint import list_checkpoints, read_metadata
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY, ROUNDS = 12, 3, 2
SETTINGS = (
    "model.num_layers=12",
    "model.hidden_size=576",
    "model.num_attention_heads=12",
    "data.seq_length=64",
    "micro_batch_size=16",
    "global_batch_size=16",
    f"trainer.max_steps={STEPS}",
    "trainer.num_validation_samples=2",
    "trainer.validate_every_steps=0",
    "trainer.progress_bar=false",
    "trainer.accelerator=cpu",
    "logger.tensorboard=false",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
    "checkpoint.save_last=false",
    "checkpoint.keep_last=1",
)


def train(run_dir: Path, in_background: bool) -> tuple[list[float], list[float], int]:
    """Train; returns seconds waited per save except the first, seconds per step and the checkpoint's bytes."""
    overrides = (*SETTINGS, f"checkpoint.async={str(in_background).lower()}", f"hydra.run.dir={run_dir}")
    run_python("src/train.py", *overrides, stdout=subprocess.DEVNULL)
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    waits = [float(row["time/checkpoint_s"]) for row in rows]  # recorded in the row of the step after the save
    steps = [float(row["time/step_s"]) for row in rows]
    metadata = read_metadata(list_checkpoints(run_dir / "checkpoints")[-1])
    return [wait for wait in waits if wait > 0][1:], steps[1:], sum(f.num_bytes for f in metadata.files.values())


def main() -> int:
    """Measure, print the medians and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=None, help="default: outputs/checkpoint_cost/<time>")
    parser.add_argument("--record", type=record_argument, default=None, help="default: record.json in the folder")
    options = parser.parse_args()
    folder = options.folder or ROOT / "outputs" / "checkpoint_cost" / time.strftime("%Y-%m-%d_%H-%M-%S")
    waits: dict[bool, list[float]] = {False: [], True: []}
    steps: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS):
        for in_background in (False, True):
            waited, stepped, size = train(folder / f"{number}_{in_background}", in_background)
            waits[in_background] += waited
            steps[in_background] += stepped
    metrics = {"checkpoint_size": {"value": size, "unit": "bytes"}}
    for in_background, name in ((False, "foreground"), (True, "background")):
        metrics[f"{name}/wait"] = {"value": statistics.median(waits[in_background]), "unit": "s/save"}
        metrics[f"{name}/longest_wait"] = {"value": max(waits[in_background]), "unit": "s/save"}
        metrics[f"{name}/step_time"] = {"value": statistics.median(steps[in_background]), "unit": "s/step"}
    ratio = metrics["foreground/wait"]["value"] / metrics["background/wait"]["value"]
    metrics["wait_ratio"] = {"value": ratio, "unit": "foreground / background"}
    layout = {"tp_size": 1, "dp_size": 1}
    config = {"overrides": list(SETTINGS), "rounds": ROUNDS}
    record = new_record(
        "checkpoint_cost",
        "run",
        config=config,
        seed=1234,
        metrics=metrics,
        device="cpu",
        layout=layout,
        steps=[0, STEPS],
    )
    path = options.record or folder / "record.json"
    write_record(record, path)
    print(json.dumps({name: entry["value"] for name, entry in metrics.items()}, indent=1))
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
