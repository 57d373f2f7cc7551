"""The paths that a pretraining reads, checked without torch, which takes seconds to import."""

from pathlib import Path

from ...config.pretrain import RunConfig
from ...data.indexed_corpus import check_indexed
from ...data.sources import check_corpus
from ...launcher import world_from_outside


def read_run(values: dict) -> RunConfig:
    """The typed configuration of a run whose corpus and checkpoint exist.

    Raises:
        ValueError: anything invalid in the values; a path is missing.
    """
    run = RunConfig.from_dict(values)
    check_paths(run)
    return run


def check_paths(run: RunConfig) -> None:
    """Check that the corpus and the checkpoint of a run exist, and that a restart by torchrun would go on from it.

    Raises:
        ValueError: one is missing; torchrun may restart the run, which would not look for its own checkpoints.
    """
    check_corpus(run.data)
    check_indexed(run.data, run.model.family)
    path, world = run.resume.path, world_from_outside()
    # `max_restarts` decides, because a node that only waited for another node's restart has counted no restart.
    if world is not None and world.launcher == "torchrun" and world.max_restarts and path != "auto":
        raise ValueError(
            f"`resume` must be auto under torchrun's --max-restarts, or a restart loses what was trained, but is {path}"
            "; a first start without restarts can begin from another checkpoint"
        )
    if not is_restart() and path not in ("none", "auto") and not Path(path).exists():
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {path!r} does not exist")


def is_restart() -> bool:
    """Whether an elastic agent (ours or torchrun's) has restarted this process after a failure."""
    world = world_from_outside()
    return world is not None and world.restarts > 0
