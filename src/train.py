"""Pretrain BERT or GPT: `python src/train.py model=bert_3.9b parallel.tp_size=2`; every key: conf/train.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
import re
import sys
from functools import partial

from lmscale.cli.hydra_main import hydra_files, run_hydra_main, run_task
from lmscale.cli.next_command import after_training, continue_trainings
from lmscale.cli.own_keys import add_own_keys
from lmscale.output import outlast_full_disk
from lmscale.runtime.interruption import stop_before_training
from lmscale.runtime.world import join_ranks, world_from_outside


def train(values: dict, files: dict[str, str]) -> None:
    """Resolve the configuration, and run `pretrain` on every rank: build model, data and Trainer, then fit.

    Ranks are started here, or are those of torchrun or srun.

    Args:
        files: texts by path, written into the run folder when training starts.
    """
    from lmscale.config.pretrain import RunConfig
    from lmscale.training.resolve import resolve

    outlast_full_disk()
    join_ranks()
    run = resolve(RunConfig.from_dict(values), world_from_outside(), files)
    from lmscale.runtime.launch import launch
    from lmscale.training.pretrain import pretrain  # imports Lightning, which takes seconds

    launch(pretrain, run, run.layout.world_size, run.request.max_restarts, saves=True)


if __name__ == "__main__":
    stop_before_training(lmscale.cli.ctrl_c.leave)
    # `resume=X` is short for `resume.path=X`; plain Hydra would replace the whole group by the text.
    sys.argv = [re.sub(r"^(\+*)resume=", r"\1resume.path=", arg) for arg in sys.argv]
    run_hydra_main(
        lambda cfg: run_task(partial(train, files=hydra_files(cfg)), cfg, after_training, continue_trainings),
        joins_ranks=True,
        before=add_own_keys,
    )
