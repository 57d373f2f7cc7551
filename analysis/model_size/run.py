"""Figure 6, scaled down: run the cells of `sweep=model_size`, then fit loss against parameters and FLOPs.

    python analysis/model_size/run.py                        # all cells without a record, then the summary; 30 min
    python analysis/model_size/run.py --sizes 32 192 --seeds 1

Each cell is one run of `src/train.py` on one thread, trained on the documentation that ships with Python. Its record is
written to `records/model_size/`. Cells that have a record are skipped, so delete the folder after changing the sweep.
The summary, `records/model_size.json`, contains the power laws L = a x^-b and L = a x^-b + c, where x is the number of
parameters without embeddings, of all parameters, or of training FLOPs. `make figures` draws it.
"""

import argparse
import csv
import json
import os
import resource
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from omegaconf import OmegaConf

from analysis.model_size.power_law import PowerLaw, fit_power_law
from analysis.running import run_python
from lmscale.config import TransformerConfig
from lmscale.planner.flops import model_flops_per_step
from lmscale.planner.params import count_parameters
from lmscale.results import new_record, write_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "analysis" / "model_size" / "records"
SWEEP = ROOT / "conf" / "train" / "sweep" / "model_size.yaml"
NUM_POINTS = 20  # largest number of points of a curve
MEASURES = {
    "parameters_without_embeddings": "parameters",
    "parameters": "parameters",
    "flops": "FLOPs",
}
SIZE = ("num_layers", "hidden_size")  # keys of the model that may differ between cells, besides the seed
KEPT = ("name", "model", "data", "tokenizer", "optimizer", "schedule", "trainer", "precision", "micro_batch_size")
KEPT += ("global_batch_size", "fidelity", "overrides")  # keys of a run's configuration that its cell's record keeps


def swept(key: str) -> list[int]:
    """Values of a key in the sweep."""
    return [int(value) for value in OmegaConf.load(SWEEP).hydra.sweeper.params[key].split(",")]


def train(overrides: Sequence[str]) -> None:
    """Run `src/train.py` on one thread with the current interpreter; its output goes to the terminal."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run_python("src/train.py", *overrides, cwd=ROOT, env=environment)


def run_cell(size: int, seed: int, more: Sequence[str], outputs: Path, records: Path) -> None:
    """Train one cell and write its record, unless it has one. An incomplete run folder is deleted first."""
    target = records / f"hidden_{size}_seed_{seed}.json"
    if target.is_file():
        return
    run_dir = outputs / target.stem
    cell = (f"model.hidden_size={size}", f"seed={seed}", *more)
    print(f"--- {target.stem}", flush=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    train(("sweep=model_size", "hydra.mode=RUN", *cell, f"hydra.run.dir={run_dir}"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    write_record(describe_cell(run_dir, cpu_s), target)


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


def read_cells(records: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the existing records of cells, by hidden size in ascending order.

    Raises:
        ValueError: a setting other than the size and the seed differs between cells.
    """
    cells: dict[int, list[dict[str, Any]]] = {}  # all recorded sizes and seeds, not only the requested ones
    for path in sorted(records.glob("hidden_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        cells.setdefault(record["config"]["model"]["hidden_size"], []).append(record)
    first: dict[str, Any] = {}
    for record in (record for size in cells.values() for record in size):
        config = {k: v for k, v in record["config"].items() if k not in ("name", "overrides", "curve")}
        config["model"] = {key: value for key, value in config["model"].items() if key not in SIZE}
        first = first or config
        for name in (name for name in config if config[name] != first[name]):
            raise ValueError(f"`{name}` must be the same in all cells of {records}, but is not in {record['name']}")
    return dict(sorted(cells.items()))


def name_of(record: dict[str, Any]) -> str:
    """The size of a cell: layers x hidden."""
    return "x".join(str(record["config"]["model"][key]) for key in SIZE)


def mean_curve(runs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Average the validation curves of the runs of one size."""
    curves = zip(*(run["config"]["curve"] for run in runs), strict=True)
    return [{"step": rows[0]["step"], "loss": statistics.fmean(row["loss"] for row in rows)} for rows in curves]


def fit_all(cells: dict[int, list[dict[str, Any]]]) -> dict[str, dict[str, PowerLaw]]:
    """Fit, per measure of size, the law without a floor and, for at least four sizes, the law with one."""
    losses = [[run["metrics"]["val/loss"]["value"] for run in runs] for runs in cells.values()]
    laws: dict[str, dict[str, PowerLaw]] = {}
    for measure in MEASURES:
        x = [runs[0]["metrics"][measure]["value"] for runs in cells.values()]
        laws[measure] = {"plain": fit_power_law(x, losses, floor=False)}
        if len(x) > 3:
            laws[measure]["floor"] = fit_power_law(x, losses, floor=True)
    return laws


def summarize(cells: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Build the record of the study: every size, every law and the mean curves.

    Raises:
        ValueError: there are too few sizes or seeds to fit a law.
    """
    laws, metrics = fit_all(cells), {}
    for runs in cells.values():
        losses, name = [run["metrics"]["val/loss"]["value"] for run in runs], name_of(runs[0])
        metrics |= {f"{name}/{m}": runs[0]["metrics"][m] for m in (*MEASURES, "tokens")}
        metrics[f"{name}/loss"] = {"value": statistics.fmean(losses), "unit": "nats/token"}
        metrics[f"{name}/loss_lowest"] = {"value": min(losses), "unit": "nats/token"}
        metrics[f"{name}/loss_highest"] = {"value": max(losses), "unit": "nats/token"}
    for measure, kinds in laws.items():
        for kind, law in kinds.items():
            if kind == "floor" and not floor_is_borne(kinds):
                continue  # identical to the law without a floor
            metrics |= {f"{measure}/{kind}/{name}": entry for name, entry in describe_law(law).items()}
    cpu_s = sum(run["metrics"]["cpu_time"]["value"] for runs in cells.values() for run in runs)
    metrics["cpu_time"] = {"value": cpu_s, "unit": "s"}
    seeds = sorted({run["seed"] for runs in cells.values() for run in runs})
    curves = {name_of(runs[0]): mean_curve(runs) for runs in cells.values()}
    config = {"seeds": seeds, "floor_is_borne": {m: floor_is_borne(k) for m, k in laws.items()}, "curves": curves}
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    return new_record("model_size", "scaled_down", config, seeds[0], metrics, device="cpu", layout=layout)


def floor_is_borne(laws: dict[str, PowerLaw]) -> bool:
    """Whether the floor is significant: its 95 % interval lies above 0."""
    return "floor" in laws and laws["floor"].c_interval[0] > 0


def describe_law(law: PowerLaw) -> dict[str, dict[str, Any]]:
    """The coefficients and statistics of a law with their units."""
    values = {"a": law.a, "b": law.b, "b_seeds_low": law.b_interval[0], "b_seeds_high": law.b_interval[1]}
    if law.b_line_interval is None:
        values |= {"c": law.c, "c_low": law.c_interval[0], "c_high": law.c_interval[1]}
    else:
        values |= {"b_low": law.b_line_interval[0], "b_high": law.b_line_interval[1]}
    if law.lack_of_fit is not None:
        values["lack_of_fit"] = law.lack_of_fit
    values["r_squared"] = law.r_squared
    values["largest_residual"] = 100 * law.largest_residual
    units = {"c": "nats/token", "c_low": "nats/token", "c_high": "nats/token", "largest_residual": "%"}
    return {name: {"value": value, "unit": units.get(name, "1")} for name, value in values.items()}


def main() -> int:
    """Run the missing cells, the first seed of every size first, then summarize."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="more keys of train.py, for a trial with other --records")
    parser.add_argument("--sizes", nargs="+", type=int, choices=swept("model.hidden_size"), metavar="HIDDEN")
    parser.add_argument("--seeds", nargs="+", type=int, choices=swept("seed"))
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "model_size", help="run folders")
    parser.add_argument("--records", type=Path, default=RECORDS / "model_size", help="folder of the cells' records")
    options = parser.parse_args()
    for seed in options.seeds or swept("seed"):
        for size in options.sizes or swept("model.hidden_size"):
            run_cell(size, seed, options.overrides, options.outputs.resolve(), options.records)
    try:
        record = summarize(read_cells(options.records))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    target = options.records.with_suffix(".json")
    write_record(record, target)
    print(*(f"{name} = {entry['value']:.6g} {entry['unit']}" for name, entry in record["metrics"].items()), sep="\n")
    print(f"record: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
