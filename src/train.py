"""Pretrain BERT or GPT: `python src/train.py model=bert_3.9b parallel.tp_size=2`; every key: conf/train.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
import sys
from functools import partial

import hydra
from omegaconf import DictConfig

from lmscale.cli.hydra_main import hydra_files, run_hydra_main, run_task
from lmscale.cli.next_command import after_training
from lmscale.cli.own_keys import add_own_keys
from lmscale.launcher import join_ranks
from lmscale.training.runtime.interruption import stop_before_training


def train(values: dict, files: dict[str, str]) -> None:
    """Resolve the configuration, and run `pretrain` on every rank: build model, data and Trainer, then fit.

    Ranks are started here, or are those of torchrun or srun.

    Args:
        files: texts by path, written into the run folder when training starts.
    """
    from lmscale.config.pretrain import RunConfig
    from lmscale.training.resolve import resolve

    join_ranks()
    job = resolve(RunConfig.from_dict(values), files)
    from lmscale.training.pretrain import pretrain  # imports Lightning, which takes seconds
    from lmscale.training.runtime.launch import launch

    launch(pretrain, job, job.layout.world_size, job.run.max_restarts, saves=True)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Hydra's entry, called once per job of a sweep."""
    run_task(partial(train, files=hydra_files(cfg)), cfg, then=after_training)


def start() -> None:
    """Complete the command line of a run that continues in its folder, and start Hydra."""
    add_own_keys()
    main()


if __name__ == "__main__":
    stop_before_training()
    # `resume=X` is short for `resume.path=X`; plain Hydra would replace the whole group by the text.
    sys.argv = [arg.replace("resume=", "resume.path=", 1) if arg.startswith("resume=") else arg for arg in sys.argv]
    run_hydra_main(start, joins_ranks=True)
