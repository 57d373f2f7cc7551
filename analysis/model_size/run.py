"""Figure 6, scaled down: run the cells of `sweep=model_size` that have no record.

    python analysis/model_size/run.py --records outputs/model_size/cells.jsonl       # all of them; 30 min
    python analysis/model_size/run.py --records FILE --sizes 32 192 --seeds 1

Each cell is one run of `src/train.py` on one thread, trained on the documentation that ships with Python. Its record is
a line of the file `--records`, which `decide.py` evaluates. Use a new file after changing the sweep.
"""

import argparse
import csv
import json
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from omegaconf import OmegaConf

from analysis.model_size.decide import RECORDS
from analysis.report.records import add_line, read_lines
from analysis.running import run_python
from lmscale.config import TransformerConfig
from lmscale.planner.flops import model_flops_per_step
from lmscale.planner.params import count_parameters
from lmscale.results import new_record

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "conf" / "train" / "sweep" / "model_size.yaml"
NUM_POINTS = 20  # largest number of points of a curve
KEPT = ("name", "model", "data", "tokenizer", "optimizer", "schedule", "trainer", "precision", "micro_batch_size")
KEPT += ("global_batch_size", "fidelity", "overrides")  # keys of a run's configuration that its cell's record keeps


def swept(key: str) -> list[int]:
    """Values of a key in the sweep."""
    return [int(value) for value in OmegaConf.load(SWEEP).hydra.sweeper.params[key].split(",")]


def train(overrides: Sequence[str]) -> None:
    """Run `src/train.py` on one thread with the current interpreter; its output goes to the terminal."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run_python("src/train.py", *overrides, cwd=ROOT, env=environment)


def run_cell(overrides: Sequence[str], run_dir: Path) -> dict[str, Any]:
    """Train one cell and build its record. An incomplete run folder is deleted first."""
    print(f"--- {run_dir.name}", flush=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    train(("sweep=model_size", "hydra.mode=RUN", *overrides, f"hydra.run.dir={run_dir}"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return describe_cell(run_dir, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def describe_cell(run_dir: Path, cpu_s: float) -> dict[str, Any]:
    """Build a cell's record from its run folder: the run's metrics, the model's size and the validation curve."""
    run = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    config, steps = run["config"], int(run["metrics"]["steps"]["value"])
    model = TransformerConfig.from_dict(config["model"])
    counts = count_parameters(model)
    embeddings = counts.parts["word embedding"] + counts.parts["position embedding"]
    seq_length, batch = config["data"]["seq_length"], config["global_batch_size"]
    flops = steps * model_flops_per_step(model, seq_length, batch)
    metrics = {name: run["metrics"][name] for name in ("val/loss", "val/perplexity", "train_time", "steps")}
    metrics |= {
        "parameters": {"value": counts.total, "unit": "parameters"},
        "parameters_without_embeddings": {"value": counts.total - embeddings, "unit": "parameters"},
        "flops": {"value": flops, "unit": "FLOPs"},
        "tokens": {"value": steps * batch * seq_length, "unit": "tokens"},
        "cpu_time": {"value": cpu_s, "unit": "s"},
    }
    kept = {name: config[name] for name in KEPT}
    kept["corpus"] = {part: config["corpus"][part] for part in ("train", "validation")}
    kept["curve"] = read_curve(run_dir / "metrics.csv")
    record = new_record(config["name"], "scaled_down", kept, run["seed"], metrics, device="cpu", layout=run["layout"])
    record["environment"]["cpu_details"] = run["environment"]["cpu_details"]  # this process may not have torch
    return record


def read_curve(path: Path) -> list[dict[str, float]]:
    """Read step and validation loss at up to `NUM_POINTS` evenly spaced validations, including the last."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    stride = -(-len(rows) // NUM_POINTS)
    return [{"step": int(row["step"]), "loss": float(row["val/loss"])} for row in rows[::-1][::stride][::-1]]


def main() -> int:
    """Run the missing cells, the first seed of every size first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="more keys of train.py, for a trial with other --records")
    parser.add_argument("--sizes", nargs="+", type=int, choices=swept("model.hidden_size"), metavar="HIDDEN")
    parser.add_argument("--seeds", nargs="+", type=int, choices=swept("seed"))
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "model_size", help="run folders")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the cells' records")
    options = parser.parse_args()
    try:
        recorded = read_lines(options.records)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for seed in options.seeds or swept("seed"):
        for size in options.sizes or swept("model.hidden_size"):
            if (name := f"hidden_{size}_seed_{seed}") not in recorded:
                overrides = (f"model.hidden_size={size}", f"seed={seed}", *options.overrides)
                add_line(options.records, name, run_cell(overrides, options.outputs.resolve() / name))
    print(f"records: {options.records}; python analysis/model_size/decide.py --records {options.records} fits the laws")
    return 0


if __name__ == "__main__":
    sys.exit(main())
