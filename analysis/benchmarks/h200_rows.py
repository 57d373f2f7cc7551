"""Rows of `analysis/benchmarks/h200.sh`: measured and required values.

python analysis/benchmarks/h200_rows.py row TITLE RECORD METRIC LEAST
python analysis/benchmarks/h200_rows.py keep RUN_FOLDER RECORD       # a run's record, with the curve of its loss
python analysis/benchmarks/h200_rows.py seeds RECORD_FP8 RECORD_BF16 RECORD_BF16 ...
python analysis/benchmarks/h200_rows.py tests JUNIT_XML RECORD            # the outcome of every test of a pytest run
python analysis/benchmarks/h200_rows.py times RECORD                          # a kept run's step, by phase
python analysis/benchmarks/h200_rows.py scaling RECORD RECORD_OF_1_GPU RECORD ...  # Figure 5, from weak scaling
python analysis/benchmarks/h200_rows.py imports                           # exit code 2 if a package is missing
python analysis/benchmarks/h200_rows.py card [CARD]                       # the machine's card and its GiB
"""

import argparse
import csv
import importlib
import json
import math
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from lmscale.cli.errors import one_line_errors
from lmscale.planner.memory import GIB, GPU_RESERVED_GIB
from lmscale.results import checked_metric, new_record, path_argument, write_record

# What the measurements import, ours last: each brings in what it needs itself.
IMPORTS = (
    *("torch", "lightning", "transformers", "hydra", "pytest", "xdist", "pytest_timeout"),
    *(
        "lmscale.cli.hydra_main",
        "lmscale.training.pretrain",
        "analysis.benchmarks.race",
        "analysis.benchmarks.gpu.trace",
        "analysis.norm_order.true_widths",
    ),
)
PHASES = {f"time/{phase}_s": f"train/{phase}" for phase in ("step", "forward", "backward", "optimizer")}
PEAK = "train/memory_peak"
FORECASTS = Path(__file__).parent / "records"
PLAN_ERROR = 0.03  # of the planned bytes of a rank's tensors
LAST_STEPS = 50  # of a curve, whose mean stands for where the run has come to


def row(title: str, record: Path, metric: str, least: float) -> str:
    """One line: what was measured, what is required, and whether it is reached."""
    entry, beside = read_metric(record, metric), f"(required: {least:g}{forecast_of(record, metric)})"
    if entry["value"] is None:
        return f"{title:<55} {entry['non_finite']} {entry['unit']} {beside}  NOT REACHED"
    verdict = "reached" if entry["value"] >= least else "NOT REACHED"
    return f"{title:<55} {entry['value']:.4g} {entry['unit']} {beside}  {verdict}"


def ratio(title: str, record: Path, other: Path, metric: str, least: float) -> str:
    """One line: a metric of a record over that of another, what is required, and whether it is reached."""
    value = read_finite(record, metric) / read_finite(other, metric)
    return f"{title:<55} {value:.4g} (required: {least:g})  {'reached' if value >= least else 'NOT REACHED'}"


def forecast_of(record: Path, metric: str) -> str:
    """What was forecast for a metric of a record, for its row; empty if nothing was."""
    card, _, name = record.stem.partition("_")
    path = FORECASTS / f"{card}_forecast_2.json"  # `forecast.record_of`
    entry = read(path)["metrics"].get(f"{name}/{metric}") if path.exists() else None
    return f", forecast: {entry['value']:.4g}" if entry else ""


def times(record: Path) -> str:
    """The step of a kept run, its phases and its memory, each with its forecast; on a GPU whether the plan held."""
    metrics = read(record)["metrics"]
    rows = [
        f"{record.stem + ' ' + name:<55} {entry['value']:.4g} {entry['unit']}{forecast_of(record, name)}"
        for name, entry in metrics.items()
        if name in (*PHASES.values(), PEAK)
    ]
    if "gpu_memory/planned" in metrics:
        names = ("planned", "peak_allocated", "peak_reserved", "context")
        planned, allocated, reserved, context = (metrics[f"gpu_memory/{name}"]["value"] for name in names)
        error, beyond = allocated / planned - 1, (reserved + context - planned) / GIB
        for name, found, required, is_reached in (
            ("tensors against the plan", f"{100 * error:+.1f} %", "within 3 %", abs(error) <= PLAN_ERROR),
            ("beyond the plan", f"{beyond:.2f} GiB", f"at most {GPU_RESERVED_GIB:g}", beyond <= GPU_RESERVED_GIB),
        ):
            verdict = "reached" if is_reached else "NOT REACHED"
            rows.append(f"{record.stem + ' memory ' + name:<55} {found} (required: {required})  {verdict}")
    return "\n".join(rows)


def scaling(path: Path, records: list[Path]) -> str:
    """Write Figure 5 as measured: FLOP/s per GPU of models that grow with the GPUs, over those of one.

    Raises:
        ValueError: the first run is not of one GPU, or the runs differ in batch.
    """
    from analysis.scaling.study import efficiency
    from lmscale.config import TransformerConfig

    found = [read(record) for record in records]
    configs = [TransformerConfig.from_dict(run["config"]["model"]) for run in found]
    sizes = [run["layout"]["tp_size"] for run in found]
    if sizes[0] != 1 or len({run["config"]["global_batch_size"] for run in found}) > 1:
        raise ValueError(f"the runs must begin with one GPU and have one batch size, but have tp_size {sizes}")
    steps = [read_finite(record, "train/step") for record in records]
    metrics = {}
    for size, config, step in zip(sizes, configs, steps, strict=True):
        percent = efficiency(config, size, step, configs[0], steps[0])
        metrics[f"figure_5/mp/{size}_gpu{'s' * (size > 1)}"] = {"value": percent, "unit": "% of linear"}
    settings = {"runs": [run["config"]["name"] for run in found]}
    write_record(new_record("figure_5", "run", settings, None, metrics, device=found[0]["environment"]["device"]), path)
    return ", ".join(f"{name}: {entry['value']:.1f} %" for name, entry in metrics.items())


def keep(folder: Path, path: Path) -> str:
    """Write a run's record with its losses, median step of the second half and peak memory; returns its path.

    Raises:
        ValueError: the run has no losses.
    """
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["train/loss"]]
    losses = [float(line["train/loss"]) for line in lines]
    if not losses:
        raise ValueError(f"{folder / 'metrics.csv'} must have a loss, but has none")
    record = read(folder / "record.json")
    figures = {
        "train/loss_first": losses[0],
        "train/loss_fall": losses[0] - losses[-1],
        "train/loss_mean_of_last": statistics.mean(losses[-LAST_STEPS:]),
    }
    later = lines[len(lines) // 2 :]  # the first steps compile and warm up
    metrics = {name: {"value": loss, "unit": "nats/token"} for name, loss in figures.items()}
    for column, name in PHASES.items():
        if column in lines[0]:
            metrics[name] = {"value": statistics.median(float(line[column]) for line in later), "unit": "s"}
    metrics[PEAK] = {"value": max(float(line["memory_gib"]) for line in lines), "unit": "GiB"}
    record["metrics"] |= {name: checked_metric(name, entry) for name, entry in metrics.items()}
    record["train_losses"] = [loss if math.isfinite(loss) else None for loss in losses]
    write_record(record, path)
    return f"record: {path}"


def seeds(fp8: Path, bf16: list[Path]) -> str:
    """Whether float8's loss lies among those of bf16: no further from their mean than two standard deviations.

    Raises:
        ValueError: less than two records in bf16, or one that `keep` has not written.
    """
    if len(bf16) < 2:
        raise ValueError(f"the records in bf16 must be at least 2, for a standard deviation, but there is {len(bf16)}")
    found, *others = (read_finite(path, "train/loss_mean_of_last") for path in (fp8, *bf16))
    mean, spread = statistics.mean(others), statistics.stdev(others)
    verdict = "reached" if abs(found - mean) <= 2 * spread else "NOT REACHED"
    return (
        f"gpt_2.5b, mean loss of the last {LAST_STEPS} of 200 steps: fp8 {found:.4f}, bf16 {mean:.4f} +- {spread:.4f} "
        f"over {len(others)} seeds (required: within two standard deviations)  {verdict}"
    )


def tests(junit: Path, path: Path, may_skip: bool) -> str:
    """Write the record of a pytest run that passed; returns how many tests passed and which were skipped.

    Raises:
        ValueError: a test failed, or none passed although `may_skip` is false: then the machine showed nothing.
    """
    outcomes = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        found = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[case.get("name")] = {"outcome": next(iter(found), "passed"), "time_s": float(case.get("time"))}
    count = {kind: [n for n, o in outcomes.items() if o["outcome"] == kind] for kind in ("passed", "skipped")}
    failed = sorted(set(outcomes) - set(count["passed"]) - set(count["skipped"]))
    if failed:
        raise ValueError(f"every test must pass, but these failed: {', '.join(failed)}")
    if not count["passed"] and not may_skip:
        raise ValueError(f"at least one test must pass, but all {len(outcomes)} were skipped")
    metrics = {kind: {"value": len(names), "unit": "tests"} for kind, names in count.items()}
    record = new_record("gpu_tests", "run", {"may_skip": may_skip}, None, metrics, device=_device_name())
    write_record(record | {"tests": outcomes}, path)
    return f"{len(count['passed'])} passed, {len(count['skipped'])} skipped: {', '.join(count['skipped']) or 'none'}"


def imports() -> str:
    """Import all of `IMPORTS`; returns nothing to print.

    Raises:
        ValueError: some cannot be imported, with the reasons.
    """
    import torch

    missing = []
    for name in (*IMPORTS, *["pynvml"] * torch.cuda.is_available()):  # nvidia-ml-py, which reads a GPU's clocks
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        raise ValueError(f"packages must be there, in WHEELS or installed, but are not: {'; '.join(missing)}")
    return ""


def card(expected: str) -> str:
    """The card of this machine, by which records are named, and its memory in GiB.

    Raises:
        ValueError: there is none that `forecast.CARDS` names, or another one than `expected`.
    """
    import torch

    from analysis.benchmarks.forecast import CARDS

    device = _device_name()
    found = next((card for card in CARDS if card.upper() in device), None)
    if found is None:
        raise ValueError(f"the machine's GPU must be one of {', '.join(CARDS).upper()}, but is {device}")
    if expected not in ("", found):
        raise ValueError(f"`CARD` must be {found}, the machine's GPU ({device}), but is {expected}")
    return f"{found} {torch.cuda.get_device_properties(0).total_memory / 2**30:.2f}"


def _device_name() -> str:
    import torch  # two seconds that the other commands need not spend

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def read(path: Path) -> dict:
    """A record.

    Raises:
        ValueError: it is none.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not isinstance(record.get("metrics"), dict):
        raise ValueError(f"{path} must be a record, but has no metrics")
    return record


def read_metric(path: Path, metric: str) -> dict:
    """A metric of a record.

    Raises:
        ValueError: it has no such metric.
    """
    metrics = read(path)["metrics"]
    if metric not in metrics:
        kept = "; a run's record has it from `h200_rows.py keep`" if metric.startswith("train/loss_") else ""
        raise ValueError(f"{path} must have the metric {metric}, but has not{kept}")
    return metrics[metric]


def read_finite(path: Path, metric: str) -> float:
    """A metric's value.

    Raises:
        ValueError: it has no such metric, or one that is not finite.
    """
    entry = read_metric(path, metric)
    if entry["value"] is None:
        raise ValueError(f"{metric} must be finite, but is {entry['non_finite']} in {path}")
    return entry["value"]


@one_line_errors()
def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    file, files = {"type": path_argument}, {"type": path_argument, "nargs": "+"}
    commands = {
        row: {"title": {}, "record": file, "metric": {}, "least": {"type": float}},
        ratio: {"title": {}, "record": file, "other": file, "metric": {}, "least": {"type": float}},
        keep: {"folder": file, "path": file},
        seeds: {"fp8": file, "bf16": files},
        tests: {"junit": file, "path": file, "--may-skip": {"action": "store_true"}},
        times: {"record": file},
        scaling: {"path": file, "records": files},
        imports: {},
        card: {"expected": {"nargs": "?", "default": ""}},
    }
    subparsers = parser.add_subparsers(required=True)
    for function, arguments in commands.items():
        command = subparsers.add_parser(function.__name__)
        command.set_defaults(function=function)
        for name, options in arguments.items():
            command.add_argument(name, **options)
    given = vars(parser.parse_args())
    try:
        if text := given.pop("function")(**given):
            print(text)
    except FileNotFoundError as error:
        sys.exit(f"not measured yet: {error.filename} is missing")


if __name__ == "__main__":
    main()
