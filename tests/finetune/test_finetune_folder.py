"""The run folder and the cache of a finetuning: what earlier attempts left, who may read, what a failed save loses."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from finetune_runs import make_checkpoint, make_run, read_metrics, run_here
from omegaconf import OmegaConf

from lmscale.finetune import run_folder
from lmscale.finetune.preparing import check_values, prepare_job
from lmscale.runtime import run_lock
from lmscale.runtime.ranks import AgreedError, Ranks
from lmscale.training.strategy import TensorParallelStrategy


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


def test_a_folder_in_use_is_refused_before_a_sweep_starts(tmp_path, ckpt, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.0)
    run, lock = make_run("qqp", tmp_path, ckpt), run_lock.RunLock()
    lock.take(Path(run.run_dir))
    try:
        with pytest.raises(ValueError, match="run is in use by another job"):
            check_values(run.to_dict())
    finally:
        lock.release()
    check_values(run.to_dict())


def test_encoded_data_in_a_shared_cache_are_readable_by_others(tmp_path, ckpt) -> None:
    before = os.umask(0o022)
    try:
        job = prepare_job(make_run("qqp", tmp_path, ckpt))
    finally:
        os.umask(before)
    assert job.train.stat().st_mode & 0o777 == 0o755


def test_a_failed_save_keeps_the_results(tmp_path, ckpt, monkeypatch, capsys) -> None:
    monkeypatch.setattr(TensorParallelStrategy, "finish_save", lambda self: "the disk is full")
    run = make_run("qqp", tmp_path, ckpt, trainer__save=True, trainer__score_every_epoch=False)
    assert run_here(run) == 2
    assert "qqp/accuracy" in read_metrics(run) and (Path(run.run_dir) / "predictions/dev/logits.npy").is_file()
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("WARNING: the training loss ended")
    ]
    assert re.fullmatch(r"error: checkpoint of step \d+ not saved: the disk is full", "\n".join(lines))


def test_a_disk_too_full_for_the_record_is_one_line(tmp_path, ckpt, monkeypatch, capsys) -> None:
    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_record", fail)
    assert run_here(make_run("qqp", tmp_path, ckpt)) == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_skipped_rows_are_announced_once_per_file(tmp_path, ckpt, capsys) -> None:
    path, copy = tmp_path / "qqp_0.tsv", tmp_path / "copy.tsv"
    run = make_run("qqp", tmp_path, ckpt, task__validation={"dev": str(path), "copy": str(copy)})
    with open(path, "a", encoding="utf-8") as file:
        file.write("99\n")
    shutil.copy(path, copy)
    assert run_here(run) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: {place}: 1 row skipped, not 6 columns: line 24" for place in (path, copy)]


def test_a_run_that_saves_checks_first_that_all_ranks_share_the_folder(tmp_path, ckpt, monkeypatch) -> None:
    def refuse(self: Ranks, folder: Path) -> None:
        raise AgreedError(f"rank 1 does not see {folder}")

    monkeypatch.setattr(Ranks, "check_shared", refuse)
    run = make_run("qqp", tmp_path, ckpt, trainer__save=True)
    assert run_here(run) == 2
    assert not (Path(run.run_dir) / "metrics.csv").exists()


def test_encoded_data_are_in_the_same_cache_as_those_of_training(tmp_path, ckpt, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LMSCALE_CACHE", "")  # as not set
    assert prepare_job(make_run("qqp", tmp_path, ckpt, cache_dir=None)).train.parent == (
        tmp_path / "home/.cache/lmscale/finetune"
    )
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="^`cache_dir` must be a folder that exists or can be created"):
        prepare_job(make_run("qqp", tmp_path, ckpt, cache_dir=str(tmp_path / "file")))
    values = OmegaConf.load(Path(__file__).parents[2] / "conf/finetune.yaml")
    assert values.cache_dir is None
