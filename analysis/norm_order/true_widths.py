"""Figure 7 at its true widths: the runs of `experiment=fig7_h200`, list c of `analysis/benchmarks/h200.sh`.

    python analysis/norm_order/true_widths.py forecast                   # what they will show, written before any ran
    python analysis/norm_order/true_widths.py keep RUN_FOLDER RECORD     # the record of a run that has ended
    python analysis/norm_order/true_widths.py compare RECORD ...         # forecast and measurement

The forecast has step times and memory by the planner, and for every run the outcome that the controlled study suggests.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.norm_order.run_folder import NATS, describe_losses, read_rows, reference_losses, training_samples
from lmscale.cli.errors import one_line_errors
from lmscale.results import existing_path, new_record, record_argument, report

ROOT = Path(__file__).resolve().parents[2]
FORECAST = ROOT / "analysis" / "norm_order" / "records" / "true_widths_forecast.json"
NAME = "norm_order_true_widths"  # of the runs' records
CLUSTERS = ("h200", "h100")
FIRST_STEPS = 10  # without step time: they compile
# What every run is expected to end as, by the rules of `cells.py`, and why. Of the study's cells those with the scaled
# initialization count. Its rates are compared at equal rate x width: 1e-4 is 1.6e-3 for 336M and 2.0e-3 for 752M.
EXPECTED = {
    "bert_336m_pre": ("learned", "all pre-norm cells of the study learned, at 6 to 48 layers and all rates"),
    "bert_336m_post": ("learned", "at 24 layers both post-norm cells at 1.5e-3 learned, and one of three at 3e-3"),
    "bert_752m_pre": ("learned", "as bert_336m_pre"),
    "bert_752m_post": (
        "stuck",
        "at 3e-3 one of three post-norm cells learned at 24 layers, and the one at 48 was stuck; this lies between",
    ),
}


def runs() -> dict[str, dict[str, Any]]:
    """The runs of list c from the script's own commands: configuration by model and norm order, `bert_336m_pre`."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    import lmscale.cli.conf_files  # noqa: F401  # the resolver that conf/train.yaml uses
    from analysis.benchmarks.forecast import commands

    found = {}
    for words in commands("c"):
        words = [word.replace("resume=", "resume.path=") for word in words[words.index("src/train.py") + 1 :]]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            composed = compose("train", [word for word in words if not word.startswith("hydra.")])
        values = OmegaConf.to_container(composed, resolve=True)
        found[f"{values['model']['name']}_{values['model']['norm_order']}"] = values
    return found


def forecast() -> dict[str, Any]:
    """The record: time and memory of the runs on each device, the losses that decide the outcome, and the outcomes."""
    # torch and Lightning take seconds to import, which `keep` need not spend.
    from lmscale.config import Layout
    from lmscale.config.cluster import load_cluster
    from lmscale.config.pretrain import RunConfig
    from lmscale.planner.memory import GIB, checkpoint_bytes
    from lmscale.planner.plan import Plan
    from lmscale.planner.workload import Workload

    found, metrics = runs(), {}
    for cluster in CLUSTERS:
        device, sum_s = load_cluster(ROOT / "conf" / "cluster" / f"{cluster}.yaml"), 0.0
        for name, values in found.items():
            run = RunConfig.from_dict(values | {"run_dir": name})
            plan = Plan(Workload.of(run), Layout(), device)
            time_s = run.trainer.max_steps * plan.time.total
            sum_s += time_s
            metrics |= {
                f"{cluster}/{name}/step": {"value": plan.time.total, "unit": "s"},
                f"{cluster}/{name}/time": {"value": time_s, "unit": "s"},
                f"{cluster}/{name}/memory_peak": {"value": plan.needed_bytes / GIB, "unit": "GiB"},
                f"{name}/checkpoint": {"value": checkpoint_bytes(plan.job, plan.layout) / 1e9, "unit": "GB"},
            }
        metrics[f"{cluster}/time"] = {"value": sum_s / 60, "unit": "min"}
    metrics |= of_the_text(next(iter(found.values())))
    expected = {name: {"state": state, "because": reason} for name, (state, reason) in EXPECTED.items()}
    return new_record(f"{NAME}_forecast", "modelled", {"expected": expected, "runs": found}, None, metrics)


def of_the_text(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics of a run's training text: reference losses, its sequences, and how often the run goes through them."""
    num_samples = len(training_samples(values)[0])
    passes = values["trainer"]["max_steps"] * values["global_batch_size"] / num_samples
    metrics = {name: {"value": loss, "unit": NATS} for name, loss in reference_losses(values).items()}
    metrics["training_sequences"] = {"value": num_samples, "unit": "sequences"}
    return metrics | {"passes": {"value": passes, "unit": "passes over the training text"}}


def keep(run_dir: Path) -> dict[str, Any]:
    """Build the record of a run that has ended: what `cells.py` and the figure read, its step time and its memory.

    Raises:
        ValueError: the run has not begun, or it was stopped before its last step.
        FileNotFoundError: the folder is not that of a run.
    """
    values = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    rows, num_steps = read_rows(run_dir), values["trainer"]["max_steps"]
    diverged = any(run_dir.glob("not_finite_step_*.json"))
    if not diverged and (not (run_dir / "record.json").is_file() or len(rows) < num_steps):
        raise ValueError(f"the run must have ended after {num_steps} steps, but {run_dir} has {len(rows)}")
    metrics, curves = describe_losses(rows, diverged, values["schedule"]["warmup_steps"])
    step_times = [row["time/step_s"] for row in rows]
    metrics |= of_the_text(values) | {
        "step": {"value": statistics.median(step_times[FIRST_STEPS:] or step_times), "unit": "s"},
        "time": {"value": sum(step_times), "unit": "s"},
        "memory_peak": {"value": max(row["memory_gib"] for row in rows), "unit": "GiB"},
    }
    model = values["model"]
    cell = {
        "layers": model["num_layers"],
        "order": model["norm_order"],
        "scaled": model["scale_residual_init"],
        "lr": values["optimizer"]["lr"],
        "seed": values["seed"],
    }
    config = {"name": f"{model['name']}_{model['norm_order']}", "cell": cell, "run": values} | curves
    record = new_record(NAME, "scaled_down", config, values["seed"], metrics)
    if not diverged:  # then the run has described the machine, its layout and the kernels that it chose
        run = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        record["metrics"]["validation_loss"] = run["metrics"]["val/lm_loss"] | {"unit": NATS}
        record |= {key: run[key] for key in ("environment", "layout", "kernels")}
    return record


def read_record(path: Path) -> dict[str, Any]:
    """Read what `keep` has written.

    Raises:
        ValueError: the file is not such a record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("name") != NAME:
        raise ValueError(f"`records` must be records of list c of h200.sh, but {path} is not one")
    return record


def compare(forecasts: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Put outcome, step time and memory of every record beside its forecast, for the cluster of its device."""
    from analysis.norm_order.cells import read_cells  # pandas, which a bare GPU machine need not have

    lines = []
    for record, state in zip(records, read_cells(records)["state"], strict=True):
        name = record["config"]["name"]
        cluster = "h100" if "H100" in (record["environment"]["device"] or "") else "h200"
        parts = [f"{state} (expected: {forecasts['config']['expected'][name]['state']})"]
        for metric in ("step", "memory_peak"):
            expected, found = forecasts["metrics"][f"{cluster}/{name}/{metric}"], record["metrics"][metric]
            parts.append(
                f"{metric} {found['value']:.4g} {found['unit']} (forecast for {cluster}: {expected['value']:.4g})"
            )
        lines.append(f"{name:<16}{', '.join(parts)}")
    return "\n".join(lines)


@one_line_errors()
def main() -> int:
    """Write the forecast or the record of a run, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("forecast").add_argument("--record", type=record_argument, default=FORECAST)
    kept = commands.add_parser("keep")
    kept.add_argument("folder", type=existing_path)
    kept.add_argument("record", type=record_argument)
    commands.add_parser("compare").add_argument("records", type=existing_path, nargs="+")
    options = parser.parse_args()
    if options.command == "compare":
        forecasts = json.loads(FORECAST.read_text(encoding="utf-8"))
        print(compare(forecasts, [read_record(path) for path in options.records]))
        return 0
    record = forecast() if options.command == "forecast" else keep(options.folder)
    report(record, options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
