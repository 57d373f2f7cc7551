"""Compare our training step with others on the same work, or trace it; every key is in conf/bench.yaml.

    python analysis/benchmarks/bench.py peers=[hf_compiled]
    python analysis/benchmarks/bench.py trace=true peers=[] model=gpt_1.2b precision=bf16 record=FILE.json

A Chrome trace is written beside its record.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.benchmarks.config import BenchConfig
from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.results import record_path, report


def bench(values: dict) -> None:
    """Check the keys, run the comparison or the trace, print the metrics and write the record."""
    config = BenchConfig.from_dict(values)
    path = None if config.record is None else record_path(config.record)
    # torch and transformers take seconds to import, so the cheap checks come first.
    if config.trace:
        from analysis.benchmarks.gpu.operations import describe
        from analysis.benchmarks.gpu.trace import trace

        record = trace(config, path.with_name(f"{path.stem}.trace.json.gz"))
        print(describe(record["operations"]))
        print(*(f"{title}: {record[title]}" for title in ("syncs", "sync_places", "graph_breaks")), sep="\n")
        report(record, path)
        return
    from analysis.benchmarks.race import LossesDifferError, race

    try:
        record = race(config)
    except LossesDifferError as error:  # keep minutes of measurements
        report(error.record)
        raise
    report(record, path)


if __name__ == "__main__":
    run_hydra_main(lambda cfg: run_task(bench, cfg))
