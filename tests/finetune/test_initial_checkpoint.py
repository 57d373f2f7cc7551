"""Which checkpoints a finetuning starts from: reused heads and vocabularies."""

from pathlib import Path

import pytest
from finetune_runs import make_checkpoint, make_run, run_here

from lmscale.finetune.finetuning import prepare_job

COLUMNS = {"id": "id", "first": "question1", "second": "question2", "label": "is_duplicate"}


def test_a_head_is_not_reused_with_other_labels(tmp_path) -> None:
    task = {"task__name": "mine", "task__columns": COLUMNS}
    ckpt = make_checkpoint(tmp_path / "ckpt")
    trained = make_run("qqp", tmp_path, ckpt, trainer__save=True, task__labels=["0", "1"], **task)
    assert run_here(trained) == 0
    task |= {"run": "again", "trainer__num_epochs": 0}
    saved = Path(trained.run_dir)
    prepare_job(make_run("qqp", tmp_path, saved, task__labels=["0", "1"], **task))
    with pytest.raises(ValueError, match=r"`task.labels` must be \['0', '1'\], with which step_3.ckpt was finetuned"):
        prepare_job(make_run("qqp", tmp_path, saved, task__labels=["1", "0"], **task))
