"""Finetune a BERT: `python finetune/run.py task=mnli ckpt=...`; see conf/finetune.yaml for every key."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
import json
import os
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lmscale.cli.hydra_main import hydra_files, run_hydra_main, run_task
from lmscale.cli.next_command import after_finetuning
from lmscale.output import outlast_full_disk
from lmscale.runtime.world import join_ranks

# On a CPU, torch caches a kernel with its buffers for each of the last 1,024 shapes. Batches of similar length have
# many shapes, which took gigabytes. torch reads this when it is imported; 128 is as fast.
for _cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")


def finetune(values: dict, files: dict[str, str]) -> None:
    """Check the configuration, and run `finetune` on every rank: build model, data and Trainer, then fit.

    Ranks are started here, or are those of torchrun or srun. A run that has finished in its folder is left as it is, so
    that a sweep that was stopped continues with the same command.

    Args:
        files: texts by path, written into the run folder when training starts.
    """
    from lmscale.config.finetune import FinetuneConfig
    from lmscale.finetune.preparing import is_finished, prepare_job

    outlast_full_disk()
    run = FinetuneConfig.from_dict(values)
    if is_finished(run):
        print(f"finished before, nothing to do; record: {run.run_dir}/record.json", flush=True)
        return
    join_ranks()
    job = prepare_job(run, files)
    from lmscale.finetune import finetuning  # imports Lightning, which takes seconds
    from lmscale.runtime.launch import launch

    launch(finetuning.finetune, job, job.layout.world_size)


def objective(cfg: DictConfig) -> float | None:
    """The metric of the run's record that a searching sweeper optimizes; None on ranks without a record."""
    from lmscale.config.finetune import objective_of

    path = Path(HydraConfig.get().runtime.output_dir) / "record.json"
    if not path.is_file():
        return None
    metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    found = metrics.get(cfg.objective or objective_of(cfg.task))  # None if no set has labels
    return None if found is None else found["value"]


def main(cfg: DictConfig) -> float | None:
    """Hydra's entry, called once per job of a sweep."""
    run_task(partial(finetune, files=hydra_files(cfg)), cfg, then=after_finetuning, goes_on=True)
    return objective(cfg)


if __name__ == "__main__":
    run_hydra_main(main, joins_ranks=True)
