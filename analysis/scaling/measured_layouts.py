"""Check the layouts that `src/plan.py measure=4` measures on two cores against long runs of the same layouts.

    python analysis/scaling/measured_layouts.py    # four minutes on two cores that do nothing else

A GPT of 4 layers and 512 hidden, 256 tokens, in fp32. The planner times 7 steps of each layout; then each layout trains
for 63 steps, of which 60 count. The record has both medians, the model's times and the memory, and how many of the
pairs of layouts the short runs and the model order as the long runs do.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.running import ROOT, run_python
from lmscale.results import new_record, record_argument, report
from lmscale.training.measuring import WARM_UP_STEPS, label, layout_overrides, time_training

RECORD = ROOT / "analysis" / "scaling" / "records" / "measured_layouts_cpu.json"
JOB = ("model=gpt_tiny", "model.hidden_size=512", "model.num_attention_heads=8", "model.vocab_size=8192")
JOB += ("model.max_position_embeddings=256", "micro_batch_size=2", "global_batch_size=4")


def measure() -> dict[str, Any]:
    """The record that the planner writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layouts.json"
        words = [*JOB, "cluster=cpu", "num_devices=2", "measure=4", f"record={path}"]
        run_python("src/plan.py", *words)
        return json.loads(path.read_text(encoding="utf-8"))


def compare(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The metrics of the record: each row's times and memory, and how far short runs and model agree with long runs."""
    metrics = {}
    for row in rows:
        for name in ("modelled_s", "short_s", "long_s"):
            metrics[f"{row['layout']}/{name}"] = {"value": row[name], "unit": "s"}
        for name in ("modelled_bytes", "bytes"):
            metrics[f"{row['layout']}/{name}"] = {"value": row[name], "unit": "bytes"}
    for name in ("short", "modelled"):
        difference = max((row[f"{name}_s"] / row["long_s"] - 1 for row in rows), key=abs)
        pairs = [
            (one[f"{name}_s"] < two[f"{name}_s"]) == (one["long_s"] < two["long_s"])
            for one, two in itertools.combinations(rows, 2)
        ]
        metrics[f"{name}/largest_difference"] = {"value": difference, "unit": "of the long run's time"}
        metrics[f"{name}/pairs_in_order"] = {"value": sum(pairs), "unit": f"of {len(pairs)} pairs"}
    return metrics


def main() -> None:
    """Measure, print the rows and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a long run")
    parser.add_argument("--record", type=record_argument, default=RECORD)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, but is {options.steps}")
    load, started, rows = os.getloadavg()[0], time.time(), []
    planned = measure()
    for layout in planned["layouts"]:
        command = [sys.executable, str(ROOT / "src" / "train.py"), *JOB, *layout_overrides(layout)]
        long = time_training(command, WARM_UP_STEPS + options.steps, is_gpu=False)
        rows.append(
            {
                "layout": label(layout),
                "threads_per_rank": layout["threads"],
                "modelled_s": layout["modelled"]["step_time_s"],
                "short_s": layout["step_time_s"],
                "long_s": long["step_time_s"],
                "modelled_bytes": layout["modelled"]["memory_bytes"],
                "bytes": layout["memory_bytes"],
                "short_steps_s": layout["step_times_s"],
                "long_steps_s": long["step_times_s"],
            }
        )
        print({name: value for name, value in rows[-1].items() if not name.endswith("steps_s")}, flush=True)
    metrics = compare(rows) | {"load_average_before": {"value": load, "unit": "processes"}}
    config = {"job": list(JOB), "steps": options.steps, "measured_for": planned["config"], "rows": rows}
    record = new_record("measured_layouts", "run", config, planned["seed"], metrics, device="cpu", started=started)
    report(record, options.record)


if __name__ == "__main__":
    main()
