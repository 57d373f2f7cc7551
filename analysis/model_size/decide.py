"""Figure 6, scaled down: fit power laws of loss against size to the cells of `run.py`.

    python analysis/model_size/decide.py                     # the committed cells: writes the summary again
    python analysis/model_size/decide.py --records FILE      # those of `run.py --records FILE`

The summary, `model_size.json` beside the cells, has every size and the laws L = a x^-b, where x is the number of
parameters without embeddings, of all parameters, or of training FLOPs. `make figures` draws it.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np
from scipy import stats

from analysis.report.records import read_lines
from lmscale.results import new_record, write_record

RECORDS = Path(__file__).parent / "records" / "model_size.jsonl"
MEASURES = ("parameters_without_embeddings", "parameters", "flops")
SIZE = ("num_layers", "hidden_size")  # keys of the model that may differ between cells, besides the seed
MIN_SIZES, MIN_RUNS = 3, 2
NUM_RESAMPLES, PERCENTILES = 1000, (2.5, 97.5)


def fit_power_law(x: Sequence[float], runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Fit y = a x^-b to the means of the runs of each size by least squares in log y.

    Returns:
        a, b; b_seeds_low and b_seeds_high, a 95 % interval from the spread over seeds, assuming that the law is right:
        a parametric bootstrap of the means, with one standard deviation of log y for all sizes; b_low and b_high, a
        95 % interval from the residuals of the means (Student's t), which a wrong functional form widens; lack_of_fit,
        the variance of the means about the law over that of the runs about their means, near 1 if the law is right;
        r_squared of log y; largest_residual of a mean in %.

    Raises:
        ValueError: fewer than 3 sizes, or a size with fewer than 2 runs.
    """
    if len(set(x)) < MIN_SIZES:
        raise ValueError(f"a power law needs at least {MIN_SIZES} sizes, but there are {len(set(x))}")
    for size, values in zip(x, runs, strict=True):
        if len(values) < MIN_RUNS:
            raise ValueError(f"each size must have at least {MIN_RUNS} runs, but {size:g} has {len(values)}")
    log_x, logs = np.log(np.asarray(x, dtype=float)), [np.log(np.asarray(values, dtype=float)) for values in runs]
    y = np.array([np.mean(values) for values in runs])
    line, freedom = stats.linregress(log_x, np.log(y)), len(y) - 2
    variance = sum(((v - v.mean()) ** 2).sum() for v in logs) / sum(len(v) - 1 for v in logs)
    errors = np.sqrt(variance / [len(v) for v in logs])  # standard errors of the means, in log y
    drawn = np.log(y) + np.random.default_rng(0).normal(size=(NUM_RESAMPLES, len(y))) * errors
    resampled = -np.polyfit(log_x, drawn.T, 1)[0]
    half = stats.t.ppf(0.975, freedom) * line.stderr
    residuals = np.log(y) - line.intercept - line.slope * log_x
    about = sum(len(v) * r**2 for v, r in zip(logs, residuals, strict=True)) / freedom
    found = {"a": np.exp(line.intercept), "b": -line.slope}
    found |= dict(zip(("b_seeds_low", "b_seeds_high"), np.percentile(resampled, PERCENTILES), strict=True))
    found |= {"b_low": -line.slope - half, "b_high": -line.slope + half}
    found |= {"lack_of_fit": about / variance} if variance > 0 else {}
    found |= {"r_squared": line.rvalue**2, "largest_residual": 100 * np.abs(np.exp(residuals) - 1).max()}
    return {name: float(value) for name, value in found.items()}


def by_size(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Sort the records of cells by size (layers x hidden), from narrow to wide.

    Raises:
        ValueError: a setting other than the size and the seed differs between cells.
    """
    cells: dict[str, list[dict[str, Any]]] = {}
    first: dict[str, Any] = {}
    for record in sorted(records, key=lambda record: record["config"]["model"]["hidden_size"]):
        config = {k: v for k, v in record["config"].items() if k not in ("name", "overrides", "curve")}
        config["model"] = {key: value for key, value in config["model"].items() if key not in SIZE}
        first = first or config
        for name in (name for name in config if config[name] != first[name]):
            raise ValueError(f"`{name}` must be the same in all cells, but is not in {record['name']}")
        cells.setdefault("x".join(str(record["config"]["model"][key]) for key in SIZE), []).append(record)
    return cells


def mean_curve(runs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Average the validation curves of the runs of one size."""
    curves = zip(*(run["config"]["curve"] for run in runs), strict=True)
    return [{"step": rows[0]["step"], "loss": statistics.fmean(row["loss"] for row in rows)} for rows in curves]


def summarize(cells: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Build the record of the study from the result of `by_size`: every size, every law and the mean curves.

    Raises:
        ValueError: there are too few sizes or seeds to fit a law.
    """
    losses = {name: [run["metrics"]["val/loss"]["value"] for run in runs] for name, runs in cells.items()}
    metrics = {}
    for name, runs in cells.items():
        metrics |= {f"{name}/{m}": runs[0]["metrics"][m] for m in (*MEASURES, "tokens")}
        for key, value in (("", statistics.fmean), ("_lowest", min), ("_highest", max)):
            metrics[f"{name}/loss{key}"] = {"value": value(losses[name]), "unit": "nats/token"}
    for measure in MEASURES:
        law = fit_power_law([runs[0]["metrics"][measure]["value"] for runs in cells.values()], list(losses.values()))
        for name, value in law.items():
            metrics[f"{measure}/plain/{name}"] = {"value": value, "unit": "%" if name == "largest_residual" else "1"}
    every = [run for runs in cells.values() for run in runs]
    metrics["cpu_time"] = {"value": sum(run["metrics"]["cpu_time"]["value"] for run in every), "unit": "s"}
    seeds = sorted({run["seed"] for run in every})
    config = {"seeds": seeds, "curves": {name: mean_curve(runs) for name, runs in cells.items()}}
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    return new_record("model_size", "scaled_down", config, seeds[0], metrics, device="cpu", layout=layout)


def main() -> int:
    """Fit the laws, print and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the cells")
    options = parser.parse_args()
    try:
        record = summarize(by_size(read_lines(options.records).values()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_record(record, options.records.with_suffix(".json"))
    print(*(f"{name} = {entry['value']:.6g} {entry['unit']}" for name, entry in record["metrics"].items()), sep="\n")
    print(f"record: {options.records.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
