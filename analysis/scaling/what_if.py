"""The cost model beyond the paper: other machines, up to 16,384 GPUs and a trillion parameters.

    python analysis/scaling/what_if.py                    # prints every table
    python analysis/scaling/what_if.py --record out.json  # and writes them

All results are modelled. The constants of H100 and H200 are fitted to published throughputs (`fit_roofline.py`).
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from lmscale.config import Layout, TransformerConfig
from lmscale.config.cluster import Cluster, load_cluster
from lmscale.planner.memory import GIB
from lmscale.planner.params import count_parameters
from lmscale.planner.plan import make_plan
from lmscale.planner.search import rank_layouts, smallest_need
from lmscale.planner.step_time import Techniques, predict_step_time
from lmscale.planner.workload import Workload
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
STUDY = (("1.2B", 40, 1536, 16, 1), ("2.5B", 54, 1920, 20, 2), ("4.2B", 64, 2304, 24, 4), ("8.3B", 72, 3072, 32, 8))
# Name, layers, hidden, heads (enough for the tensor-parallel sizes needed).
LARGE = (
    ("8.3B", 72, 3072, 32),
    ("22B", 48, 6144, 64),
    ("66B", 64, 9216, 64),
    ("175B", 96, 12288, 128),
    ("530B", 105, 20480, 256),
    ("1T", 128, 25600, 256),
)


def cluster(name: str) -> Cluster:
    """Load a cluster of conf/cluster."""
    return load_cluster(ROOT / "conf" / "cluster" / f"{name}.yaml")


def gpt(num_layers: int, hidden_size: int, heads: int, **changes: Any) -> TransformerConfig:
    """A GPT with the paper's vocabulary and sequence length unless changed."""
    fields = {"vocab_size": 50257, "max_position_embeddings": 1024} | changes
    return TransformerConfig(
        family="gpt",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        **fields,
    )


def study(name: str) -> list[dict[str, Any]]:
    """Figure 5's sizes and layouts on another cluster without recomputation, in % of linear scaling."""
    machine, rows = cluster(name), []
    first = None
    for dp_size in (1, 64):
        for model, layers, hidden, heads, tp_size in STUDY:
            config = gpt(layers, hidden, heads)
            time = predict_step_time(config, Layout(tp_size=tp_size, dp_size=dp_size), 8, 1, 1024, "bf16", machine)
            size = count_parameters(config).total
            first = first or (size, time.total)
            percent = 100 * size / first[0] / tp_size * first[1] / time.total
            parts = {part: round(100 * getattr(time, part) / time.total, 1) for part in ("tensor", "data", "overhead")}
            rows.append({"cluster": name, "model": model, "GPUs": tp_size * dp_size, "ms": round(time.total * 1e3, 1)})
            rows[-1] |= {"% of linear": round(percent, 1)} | {f"{part} %": share for part, share in parts.items()}
    return rows


def largest(name: str, sizes: tuple[int, ...] = (512, 2048, 8192, 16384)) -> list[dict[str, Any]]:
    """Find the fastest layout per model and number of GPUs, for a batch of 4,096 sequences of 2,048 tokens."""
    machine, rows = cluster(name), []
    for model, layers, hidden, heads in LARGE:
        job = Workload(gpt(layers, hidden, heads, max_position_embeddings=2048), 1, 4096, 2048, "bf16", 100_000)
        size = count_parameters(job.config).total
        for num_devices in sizes:
            row = {"cluster": name, "model": model, "parameters": f"{size / 1e9:.1f} G", "GPUs": num_devices}
            try:
                ranking = rank_layouts(job, machine, num_devices)
            except ValueError:
                rows.append(row | {"layout": "none divides"})
                continue
            if not ranking.fitting:
                least = smallest_need(job, Layout(), machine)
                short = f"{least.missing_bytes / GIB:.0f} GiB short at tp {least.layout.tp_size}"
                rows.append(row | {"layout": short if least.missing_bytes > 0 else "too few ranks per model"})
                continue
            best = ranking.fitting[0]
            layout = f"tp {best.layout.tp_size} x dp {best.layout.dp_size}, b {best.job.micro_batch_size}"
            rows.append(row | {"layout": f"{layout}, {best.recompute.value}", "s/step": round(best.time.total, 2)})
            rows[-1] |= {
                "MFU %": round(100 * best.mfu, 1),
                "EFLOP/s": round(best.model_flops / best.time.total / 1e18, 3),
            }
    return rows


def beyond_a_node(name: str) -> list[dict[str, Any]]:
    """Tensor parallelism across nodes: the 175 B model on 2 to 128 tensor ranks with four sequences.

    Between nodes a ring uses one link or, if all its ranks on a node send together, all links; both are given.
    """
    slow = cluster(name)
    rates = slow.calibration
    all_links = min(rates.tensor_bandwidth_gb_s, rates.data_bandwidth_gb_s * slow.devices_per_node)
    fast = dataclasses.replace(slow, calibration=dataclasses.replace(rates, data_bandwidth_gb_s=all_links))
    config, rows, before = gpt(96, 12288, 128, max_position_embeddings=2048), [], {}
    for tp_size in (2, 4, 8, 16, 32, 64, 128):
        row = {"cluster": name, "tp": tp_size}
        for label, machine in (("one link", slow), ("all links", fast)):
            time = predict_step_time(config, Layout(tp_size=tp_size), 4, 1, 2048, "bf16", machine)
            gain = before.get(label, float("nan")) / time.total
            row |= {
                f"ms, {label}": round(time.total * 1e3),
                f"messages %, {label}": round(100 * time.tensor / time.total),
            }
            row |= {f"gain of doubling, {label}": round(gain, 2) if label in before else None}
            before[label] = time.total
        rows.append(row)
    return rows


def techniques(name: str) -> list[dict[str, Any]]:
    """Sequence parallelism and overlap on and off: 8.3 B, tp 8, dp 64, 8 sequences per data rank."""
    machine = cluster(name)
    job = Workload(
        gpt(72, 3072, 32, recompute="full"), 8, 512, 1024, "fp16" if name == "dgx2h_v100" else "bf16", 300_000
    )
    changes = {
        "none of these": Techniques(),
        "sequence parallelism": Techniques(),
        "gradients hidden": Techniques(hides_gradients=True),
        "gradients in half types": Techniques(gradient_bytes=2),
        "half of the tensor group's messages hidden": Techniques(tensor_overlap=0.5),
        "all of these": Techniques(0.5, True, 2),
    }
    rows, first = [], None
    for label, changed in changes.items():
        cuts_sequence = label in ("sequence parallelism", "all of these")
        plan = make_plan(job, Layout(tp_size=8, dp_size=64, sequence_parallel=cuts_sequence), machine, changed)
        first = first or plan.time.total
        rows.append({"cluster": name, "technique": label, "ms": round(plan.time.total * 1e3, 1)})
        rows[-1] |= {"speed-up": round(first / plan.time.total, 3), "MFU %": round(100 * plan.mfu, 1)}
    return rows


def format_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Format a plain-text table; every title states that it is modelled."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *[["-" if row.get(key) is None else str(row[key]) for key in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([f"{title} (modelled)", *(f"  {line}" for line in lines), ""])


def tables() -> dict[str, list[dict[str, Any]]]:
    """All tables by title."""
    found = {}
    for name in ("h100", "h200"):
        found[f"Figure 5 on {name}"] = study(name)
        found[f"Larger models on {name}"] = largest(name)
        found[f"Tensor parallelism beyond a node of {name}, 175 B"] = beyond_a_node(name)
    for name in ("dgx2h_v100", "h100"):
        found[f"What the paper did not do, on {name}"] = techniques(name)
    return found


def main() -> int:
    """Print the tables and optionally write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=record_argument, default=None)
    options = parser.parse_args()
    found = tables()
    for title, rows in found.items():
        print(format_table(title, rows))
    if options.record is not None:
        metrics = {
            f"{row['model']}, {row['GPUs']} GPUs, {row['cluster']}": {
                "value": row["% of linear"],
                "unit": "% of linear",
            }
            for name in ("h100", "h200")
            for row in found[f"Figure 5 on {name}"]
        }
        write_record(new_record("what_if", "modelled", {"tables": found}, None, metrics), options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
