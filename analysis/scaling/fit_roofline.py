"""Fit the roofline's three constants to half of a list of published training speeds, and test them on the other half.

    python analysis/scaling/fit_roofline.py

Nothing here was run by this project. The list and the constants' ranges are the configuration of the record that this
script writes, and are changed there. A run has `sizes` (layers, hidden size, heads, vocabulary), `tokens` (tokens/s of
one device; of Megatron from its TFLOP/s) and a `role`, `fit` or `held out`. The planner counts its products and
attention cores; the other passes are those of its `software`, counted from its source:

- `layer_passes` over a tensor [tokens, h] of bf16, forward and backward of one layer, in `layer_launches` kernels;
- `logit_passes` over the logits in bf16;
- `parameter_bytes` of the optimizer per parameter and step, over the devices that share it;
- `message_bytes` sent per parameter and micro-batch within a node, counted as if nothing hid them;
- `attention`, TFLOP/s of its attention core forward and backward, not causal, on long sequences (of Megatron and
  nanochat: Shah et al. 2024, Figures 5 and 6, head size 128 on an H100), and `attention_work`, the share of the causal
  scores that are computed, where there are windows;
- `other_share` of the step, work that is not counted here; `why`, where the numbers come from.

conf/cluster has the constants for A100, H100 and H200.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import numpy as np

from analysis.scaling.study import with_rates
from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.planner.operation import Operation, product, times
from lmscale.planner.params import count_parameters
from lmscale.planner.step_operations import step_operations
from lmscale.planner.workload import Workload
from lmscale.results import new_record, record_argument, report

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "analysis" / "scaling" / "records" / "roofline.json"
CONFIG = json.loads(RECORD.read_text(encoding="utf-8"))["config"]
RUNS, RANGES = CONFIG["runs"], CONFIG["ranges"]
Run = dict[str, Any]


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
    """Modelled over published tokens/s, less 1."""
    cluster = load_cluster(ROOT / "conf" / "cluster" / f"{run['cluster']}.yaml")
    return tokens_per_s(run, with_rates(cluster, **constants)) / run["tokens"] - 1


def fit(role: str = "fit") -> dict[str, float]:
    """The constants inside their ranges that miss the runs of `role` by the least squares, by shrinking grids."""
    runs = [run for run in RUNS if run["role"] == role]
    low, high = np.array([(entry["low"], entry["high"]) for entry in RANGES.values()]).T
    centre, radius = (low + high) / 2, (high - low) / 2
    for _ in range(14):
        axes = np.clip([centre - radius, centre, centre + radius], low, high).T.tolist()
        points = [dict(zip(RANGES, point, strict=True)) for point in itertools.product(*axes)]
        best = min(points, key=lambda point: sum(miss(run, point) ** 2 for run in runs))
        centre, radius = np.array(list(best.values())), radius * 0.62
    return best


def measure(constants: dict[str, float]) -> dict[str, dict]:
    """Constants and misses as the metrics of a record."""
    metrics = {name: {"value": constants[name], "unit": entry["unit"]} for name, entry in RANGES.items()}
    for role in ("fit", "held out"):
        found = {f"/{run['name']}, {run['cluster']}": miss(run, constants) for run in RUNS if run["role"] == role}
        values = list(found.values())
        found |= {", rms": statistics.mean(value**2 for value in values) ** 0.5, ", largest": max(map(abs, values))}
        metrics |= {f"{role}{name}": {"value": v, "unit": "of the published tokens/s"} for name, v in found.items()}
    return metrics


def main() -> None:
    """Fit, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=RECORD)
    options = parser.parse_args()
    constants = {name: float(f"{value:.3g}") for name, value in fit().items()}
    metrics = measure(constants)
    other = fit("held out")
    metrics |= {f"other half/{name}": {"value": other[name], "unit": entry["unit"]} for name, entry in RANGES.items()}
    report(new_record("roofline", "modelled", CONFIG, None, metrics), options.record)


if __name__ == "__main__":
    main()
