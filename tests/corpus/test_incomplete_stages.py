"""Stages whose predecessor is incomplete: they must raise an error, because their output would lack documents."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lmscale.corpus.collecting import CheckIds, SortShard
from lmscale.corpus.deduplicating import CompareCandidates, ShingleCandidates
from lmscale.corpus.finalizing import MergeShards
from lmscale.corpus.work_folder import save_array

STEPS = {
    "ids": ("ids", "clean", lambda root: CheckIds(root, 3, "count")),
    "sort": ("ids", "clean", lambda root: SortShard(root, 3, 0, 1, 5)),
    "shingles": ("members/00000", "candidates", lambda root: ShingleCandidates(root, 1, 3, 5)),
    "compare": ("pairs/00000", "candidates", lambda root: CompareCandidates(root, 1, 3, 0.7)),
    "join": (
        "overlap",
        "tokenize",
        lambda root: MergeShards(SimpleNamespace(root=root, num_shards=3, parts=[("local", "train")])),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_after_an_incomplete_stage_raises_and_writes_nothing(name: str, tmp_path: Path) -> None:
    folder, stage, step = STEPS[name]
    for task in (0, 2):
        save_array(tmp_path / folder / f"{task:05d}.npy", np.empty(0, dtype=np.int64))
        (tmp_path / folder / f"{task:05d}.parquet").touch()
    (tmp_path / folder / ".00001.npy.77").touch()  # of a task that still runs
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"all 3 tasks of `{stage}` must be complete, .* has the files of 2"):
        step(tmp_path).run()
    assert sorted(tmp_path.rglob("*")) == before
