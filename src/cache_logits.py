"""A teacher's predictions on disk: `python src/cache_logits.py ckpt=... output=...`; keys: conf/cache_logits.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.config.teacher import CacheConfig


def cache_logits(values: dict) -> None:
    """Build the config and the job, then start the ranks (or join those of torchrun or srun)."""
    config = CacheConfig.from_dict(values)
    # torch takes seconds to import, so the cheap checks above come first.
    from lmscale.evaluation import cache_job
    from lmscale.runtime.launch import launch

    launch(cache_job.compute, cache_job.prepare(config), config.parallel.tp_size * config.parallel.dp_size)


if __name__ == "__main__":
    run_hydra_main(lambda cfg: run_task(cache_logits, cfg), joins_ranks=True)
