"""The run folder and the cache of a finetuning: what earlier attempts left, who may read, what a failed save loses."""

import os
from pathlib import Path

import pytest
from finetune_runs import make_checkpoint, make_run, run_here

from lmscale.finetune.finetuning import prepare_job


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ckpt"))


def test_a_folder_with_a_checkpoint_is_refused_and_one_with_predictions_is_cleared(tmp_path, ckpt) -> None:
    run = make_run("qqp", tmp_path, ckpt, trainer__save=True)
    assert run_here(run) == 0
    folder = Path(run.run_dir)
    (folder / "record.json").unlink()
    (folder / "predictions/old").mkdir()
    with pytest.raises(ValueError, match="must be a folder without the checkpoints of another run, but .* step_3.ckpt"):
        prepare_job(run)
    (folder / "checkpoints/step_3.ckpt").rename(tmp_path / "step_3.ckpt")
    assert run_here(run) == 0
    assert not (folder / "predictions/old").exists()


def test_encoded_data_in_a_shared_cache_are_readable_by_others(tmp_path, ckpt) -> None:
    before = os.umask(0o022)
    try:
        job = prepare_job(make_run("qqp", tmp_path, ckpt))
    finally:
        os.umask(before)
    assert job.train.stat().st_mode & 0o777 == 0o755
