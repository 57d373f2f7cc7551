"""Pretrain BERT or GPT: `python src/train.py model=bert_3.9b parallel.tp_size=2`; see conf/train.yaml for every key."""

import dataclasses
import re
import sys
from functools import partial

import hydra
from omegaconf import DictConfig

from lmscale.cli.hydra_main import hydra_files, run_hydra_main, run_task


def train(values: dict, files: dict[str, str]) -> None:
    """Check everything, then start the ranks (or join those that torchrun or srun started).

    Args:
        files: what goes into the run folder as the training starts, texts by path.
    """
    from lmscale.config.pretrain import RunConfig

    run = RunConfig.from_dict(values)
    # torch and Lightning take seconds to import: not before the cheap checks above.
    from lmscale.training.pretrain import prepare_job, pretrain
    from lmscale.training.runtime.launch import launch

    job = dataclasses.replace(prepare_job(run), files=files)
    launch(pretrain, job, job.layout.world_size, run.max_restarts)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Entry of Hydra, once for each job of a sweep."""
    run_task(partial(train, files=hydra_files(cfg)), cfg)


if __name__ == "__main__":
    # `resume=X` is short for `resume.path=X`: Hydra alone would put the text in the place of the whole group.
    sys.argv = [re.sub("^resume=", "resume.path=", arg) for arg in sys.argv]
    run_hydra_main(main)
