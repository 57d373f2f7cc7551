"""Compare our training step with others on the same work; every key is in conf/bench.yaml.

python analysis/benchmarks/bench.py peers=[hf_compiled]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

import hydra
from omegaconf import DictConfig

from analysis.benchmarks.config import BenchConfig
from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.results import record_path, report


def bench(values: dict) -> None:
    """Check the keys, run the comparison, print the metrics and write the record."""
    config = BenchConfig.from_dict(values)
    if config.record is not None:
        record_path(config.record)
    # torch and transformers take seconds to import, so the cheap checks come first.
    from analysis.benchmarks.race import LossesDifferError, race

    try:
        record = race(config)
    except LossesDifferError as error:  # keep minutes of measurements
        report(error.record)
        raise
    report(record, config.record)


@hydra.main(version_base="1.3", config_path="../../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Hydra's entry, called once per job of a sweep."""
    run_task(bench, cfg)


if __name__ == "__main__":
    run_hydra_main(main)
