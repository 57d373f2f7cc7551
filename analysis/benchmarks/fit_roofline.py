"""Fit the roofline's constants to training speeds on GPUs, and test them on others.

    python analysis/benchmarks/fit_roofline.py

Two constants of compiled code were observed on one H200 and are not fitted (`OBSERVED`). The others are fitted to some
of the published speeds of a list and to our own runs in bf16. Each of our runs is also predicted by a fit without it.
The list and the constants' ranges are the configuration of the record that this script writes, and are changed there. A
run has a `role`, `fit` or `held out`; one of ours the file of its record. A published one has `sizes` (layers, hidden
size, heads, vocabulary) and `tokens` (tokens/s of one device; of Megatron from its TFLOP/s). The planner counts its
products and attention cores; the other passes are those of its `software`, counted from its source:

- `layer_passes` over a tensor [tokens, h] of bf16, forward and backward of one layer, in `layer_launches` kernels;
- `logit_passes` over the logits in bf16;
- `parameter_bytes` of the optimizer per parameter and step, over the devices that share it;
- `message_bytes` sent per parameter and micro-batch within a node, counted as if nothing hid them;
- `attention`, TFLOP/s of its attention core forward and backward, not causal, on long sequences (of Megatron and
  nanochat: Shah et al. 2024, Figures 5 and 6, head size 128 on an H100), and `attention_work`, the share of the causal
  scores that are computed, where there are windows;
- `compiled`: its other kernels are those of torch.compile, as ours; else `eager_` constants hold for them;
- `other_share` of the step, work that is not counted here; `why`, where the numbers come from.

conf/cluster has the constants for A100, H100 and H200.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from scipy import optimize

from analysis.benchmarks.forecast import RECORDS, plan_of
from analysis.scaling.study import with_rates
from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.planner.operation import DROPOUT_SHARE, Operation, product, times
from lmscale.planner.params import count_parameters
from lmscale.planner.step_operations import step_operations
from lmscale.planner.workload import Workload
from lmscale.results import new_record, record_argument, report

ROOT = Path(__file__).resolve().parents[2]
RECORD = RECORDS / "roofline.json"
CONFIG = json.loads(RECORD.read_text(encoding="utf-8"))["config"]
RUNS, RANGES = CONFIG["runs"], CONFIG["ranges"]
OURS = [run for run in CONFIG["runs"] if "record" in run]
Run = dict[str, Any]


def measured(record: str, metric: str) -> float:
    """A value of a record in analysis/benchmarks."""
    return json.loads((RECORDS / record).read_text(encoding="utf-8"))["metrics"][metric]["value"]


def copy_share() -> float:
    """Share of the copy rate that AdamW reached on an H200: its kernels move bytes and do nothing else."""
    cluster = load_cluster(ROOT / "conf" / "cluster" / "h200.yaml")
    rows = plan_of("gpt_1.2b", 32, "bf16", cluster).rows
    num_bytes = sum(row.read + row.written for row in rows if row.part == "optimizer")
    seconds = measured("h200_gpt_1.2b_train.json", "train/optimizer")
    return num_bytes / seconds / (cluster.roofline.copy_gb_s * 1e9)


# Of compiled code. A step with CUDA graphs, which shorten the time between kernels, took as long as without.
OBSERVED = {"memory_share": float(f"{copy_share():.3g}"), "launch_us": 1.0}


def tokens_per_s(run: Run, cluster: Cluster) -> float:
    """Tokens/s of one device."""
    layers, hidden, heads, vocab = run["sizes"]
    b, s, count, tp_size, software = (
        run[key] for key in ("micro_batch_size", "seq_length", "num_micro_batches", "tp_size", "software")
    )
    config = TransformerConfig("gpt", layers, hidden, heads, vocab, s, 1, hidden_dropout=0.0, attention_dropout=0.0)
    forward, backward = software["attention"]
    cluster = with_rates(cluster, attention_forward_tflops=forward, attention_backward_tflops=backward)
    layout = Layout(tp_size=tp_size, sequence_parallel=tp_size > 1)
    counted = step_operations(Workload(config, b, b * count, s, run["dtype"]), layout)
    products = [o for o in counted if o.kind in ("product", "attention") or o.name == "rounding to float8"]
    products = [o for o in products if not o.name.startswith("logits")]  # chunks are ours
    rows, columns = b * s, vocab // tp_size
    for m, n, k in ((rows, columns, hidden), (rows, hidden, columns), (columns, hidden, rows)):
        products.append(times(count, product("logits", "all", m, n, k, 2)))
    tokens = b * s * count
    passes = layers * software["layer_passes"] * hidden + software["logit_passes"] * vocab
    num_bytes = int(2 * tokens * passes / tp_size)
    num_parameters = count_parameters(config, layout).per_rank
    num_bytes += int(software["parameter_bytes"] * num_parameters)
    launches = layers * software["layer_launches"] * count
    theirs = Operation("passes of this software", "all", num_bytes, 0, launches)
    seconds = sum(o.launch_s(cluster) for o in (*products, theirs))
    seconds += count * software["message_bytes"] * num_parameters / cluster.bandwidth(8)
    for operation in (*products, theirs):
        share = software["attention_work"] if operation.kind == "attention" else 1.0
        seconds += share * operation.seconds(cluster, run["dtype"])
    return tokens / tp_size / seconds * (1 - software["other_share"])


def miss(run: Run, constants: dict[str, float]) -> float:
    """Modelled over published or measured tokens/s, less 1."""
    rates = OBSERVED | {"product_share": constants["product_share"]}
    if "record" not in run and not run["software"]["compiled"]:
        rates |= {name: constants[f"eager_{name}"] for name in OBSERVED}
    cluster = with_rates(load_cluster(ROOT / "conf" / "cluster" / f"{run['cluster']}.yaml"), **rates)
    if "record" not in run:
        return tokens_per_s(run, cluster) / run["tokens"] - 1
    attention = ("attention_forward_tflops", "attention_backward_tflops")  # all of them drop
    scale = constants["dropout_share"] / DROPOUT_SHARE
    cluster = with_rates(cluster, **{name: scale * getattr(cluster.roofline, name) for name in attention})
    plan = plan_of(run["model"], run["micro_batch_size"], run["dtype"], cluster)
    return measured(run["record"], "ours/step") / plan.time.total - 1


def fit(runs: list[Run]) -> dict[str, float]:
    """The constants inside their ranges that miss some runs by the least squares."""
    low, high = zip(*((entry["low"], entry["high"]) for entry in RANGES.values()), strict=True)
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    found = optimize.least_squares(
        lambda values: [miss(run, dict(zip(RANGES, values, strict=True))) for run in runs],
        middle,
        bounds=(low, high),
        x_scale=middle,
    )
    return {name: float(f"{value:.3g}") for name, value in zip(RANGES, found.x, strict=True)}


def measure(constants: dict[str, float]) -> dict[str, dict]:
    """Constants and misses as the metrics of a record."""
    units = {"memory_share": "of the copy rate", "launch_us": "us"} | {k: entry["unit"] for k, entry in RANGES.items()}
    metrics = {name: {"value": value, "unit": units[name]} for name, value in (OBSERVED | constants).items()}
    published = [run for run in RUNS if "record" not in run]
    for role in ("fit", "held out"):
        found = {f"/{run['name']}, {run['cluster']}": miss(run, constants) for run in published if run["role"] == role}
        values = list(found.values())
        found |= {", rms": statistics.mean(value**2 for value in values) ** 0.5, ", largest": max(map(abs, values))}
        metrics |= {f"{role}{name}": {"value": v, "unit": "of the published tokens/s"} for name, v in found.items()}
    return metrics


def leave_out() -> dict[str, dict]:
    """The miss of each of our runs, when it is among the runs of the fit and when it is not, and the constants then."""
    metrics = {}
    for run in OURS:
        others = [each for each in RUNS if each["role"] == "fit" and each is not run]
        for name, runs in (("with", [*others, run]), ("without", others)):
            constants = fit(runs)
            fitted, unit = f"ours, fitted {name} it/{run['name']}", "of the measured tokens/s"
            metrics[fitted] = {"value": miss(run, constants), "unit": unit}
            metrics |= {f"{fitted}/{k}": {"value": v, "unit": RANGES[k]["unit"]} for k, v in constants.items()}
    return metrics


def main() -> None:
    """Fit, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=RECORD)
    options = parser.parse_args()
    metrics = measure(fit([run for run in RUNS if run["role"] == "fit"])) | leave_out()
    report(new_record("roofline", "modelled", CONFIG, None, metrics), options.record)


if __name__ == "__main__":
    main()
