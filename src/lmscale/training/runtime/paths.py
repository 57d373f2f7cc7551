"""The paths that a pretraining reads, checked without torch, which takes seconds to import."""

import os
from pathlib import Path

from ...config.pretrain import RunConfig
from ...data.indexed_corpus import check_indexed
from ...data.sources import check_corpus


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
    path = run.resume.path
    if _may_restart_under_torchrun() and path != "auto":
        raise ValueError(
            f"`resume` must be auto under torchrun's --max-restarts, or a restart loses what was trained, but is {path}"
            "; a first start without restarts can begin from another checkpoint"
        )
    if not is_restart() and path not in ("none", "auto") and not Path(path).exists():
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {path!r} does not exist")


def _may_restart_under_torchrun() -> bool:
    # Nothing else tells a restart: a node that only waited for another one's restart counts none of its own.
    own_launcher = os.environ.get("TORCHELASTIC_RUN_ID", "lmscale").startswith("lmscale")
    return not own_launcher and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def is_restart() -> bool:
    """Whether an elastic agent (ours or torchrun's) has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
