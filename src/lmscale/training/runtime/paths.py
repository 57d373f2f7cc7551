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
    """Check that the corpus and the checkpoint of a run exist.

    Raises:
        ValueError: one is missing.
    """
    check_corpus(run.data)
    check_indexed(run.data)
    path = run.resume.path
    if not is_restart() and path not in ("none", "auto") and not Path(path).exists():
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {path!r} does not exist")


def is_restart() -> bool:
    """Whether an elastic agent (ours or torchrun's) has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
