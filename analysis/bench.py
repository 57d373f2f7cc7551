"""Our training step against others' on the same work: `python analysis/bench.py peers=[hf_compiled]`; every key is in
conf/bench.yaml."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lmscale.bench_config import BenchConfig
from lmscale.door import open_door, run_task


def bench(values: dict) -> None:
    """Check the keys, race, print and record."""
    config = BenchConfig.from_dict(values)
    # torch and transformers take seconds to import: not before the cheap checks above.
    from lmscale.bench.race import race
    from lmscale.results import write_record

    record = race(config)
    for name, entry in record["metrics"].items():
        print(f"{name:<32} {entry['value']:.6g} {entry['unit']}")
    if config.record is not None:
        write_record(record, Path(config.record))
        print(f"record: {config.record}")


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Entry of Hydra, once for each job of a sweep."""
    run_task(bench, cfg)


if __name__ == "__main__":
    open_door(main)
