"""Trace our training step and count its kernels, launches, graphs and host syncs; the keys are those of bench.py.

    python analysis/benchmarks/gpu/gpu_trace.py model=gpt_1.2b precision=bf16 peers=[] record=FILE.json

`steps_per_round` steps are traced; the Chrome trace is written beside the record.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `analysis`, which is not installed

import hydra
from omegaconf import DictConfig

from analysis.benchmarks.config import BenchConfig
from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.results import record_path, report

NUM_SHOWN = 25


def trace_step(values: dict) -> None:
    """Check the keys, trace the step, print the counts and write the record."""
    config = BenchConfig.from_dict(values)
    if config.peers:
        raise ValueError(f"`peers` must be [] for a trace, which covers only our step, but is {config.peers!r}")
    if config.record is None:
        raise ValueError("`record` must be a file for a trace, but is null")
    path = record_path(config.record)
    # torch takes seconds to import, so the cheap checks come first.
    from analysis.benchmarks.gpu.trace import trace

    record = trace(config, path.with_name(f"{path.stem}.trace.json.gz"))
    for kernel in record["kernels"][:NUM_SHOWN]:
        print(
            f"{kernel['share']:6.1%} {kernel['calls_per_step']:8.1f} x {1e3 * kernel['s_per_step']:9.3f} ms/step  "
            f"{kernel['name'][:80]}"
        )
    for title in ("syncs", "sync_places", "graph_breaks"):
        print(f"{title}: {record[title]}")
    report(record, path)


@hydra.main(version_base="1.3", config_path="../../../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Hydra's entry, called once per job of a sweep."""
    run_task(trace_step, cfg)


if __name__ == "__main__":
    run_hydra_main(main)
