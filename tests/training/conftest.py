"""A finished run for the tests of checkpoints and resumes."""

from pathlib import Path

import pytest
from runs import LONG, tiny_run, train_here


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of six steps that saved every second step and kept two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    run = tiny_run("gpt", folder, checkpoint__save_every_steps=2, checkpoint__keep_last=2, **LONG)
    assert train_here(run) == 0
    return folder
