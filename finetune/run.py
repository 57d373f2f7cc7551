"""Finetune a BERT: `python finetune/run.py task=mnli ckpt=...`; see conf/finetune.yaml for every key."""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lmscale.cli.hydra_main import hydra_files, run_hydra_main, run_task

# On a CPU torch keeps a kernel with its buffers for each of the last 1,024 shapes; batches of similar length have many
# shapes, which came to gigabytes. Read as torch is loaded; 128 is as fast.
for _cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")


def finetune(values: dict, files: dict[str, str]) -> None:
    """Build the config and the job, then start the ranks (or join those of torchrun or srun).

    Args:
        files: texts by path, written into the run folder when training starts.
    """
    from lmscale.config.finetune import FinetuneConfig

    run = FinetuneConfig.from_dict(values)
    # torch and Lightning take seconds to import: not before the cheap checks above.
    from lmscale.finetune import finetuning
    from lmscale.training.runtime.launch import launch

    job = dataclasses.replace(finetuning.prepare_job(run), files=files)
    launch(finetuning.finetune, job, job.layout.world_size)


def objective(cfg: DictConfig) -> float | None:
    """The figure of the run's record that a searching sweeper wants; None on ranks without a record."""
    from lmscale.finetune.tasks import objective_of

    path = Path(HydraConfig.get().runtime.output_dir) / "record.json"
    if not path.is_file():
        return None
    metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    found = metrics.get(cfg.objective or objective_of(cfg.task.name))  # none where no set has labels
    return None if found is None else found["value"]


@hydra.main(version_base="1.3", config_path="../conf", config_name="finetune")
def main(cfg: DictConfig) -> float | None:
    """Hydra's entry, called once per job of a sweep."""
    run_task(partial(finetune, files=hydra_files(cfg)), cfg)
    return objective(cfg)


if __name__ == "__main__":
    run_hydra_main(main)
