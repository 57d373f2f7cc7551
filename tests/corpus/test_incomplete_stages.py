"""Stages whose predecessor is incomplete: they must raise an error, because their output would lack documents."""

from pathlib import Path

import numpy as np
import pytest
from input_files import plan_of

from lmscale.config.corpus import DedupConfig
from lmscale.corpus.collecting import CheckIds, SortShard
from lmscale.corpus.deduplicating import CompareCandidates, ShingleCandidates
from lmscale.corpus.finalizing import MergeShards
from lmscale.corpus.plan import save_array

STEPS = {
    "ids": ("ids", "clean", CheckIds),
    "sort": ("ids", "clean", SortShard),
    "shingles": ("members/00000", "candidates", ShingleCandidates),
    "compare": ("pairs/00000", "candidates", CompareCandidates),
    "join": ("overlap", "tokenize", MergeShards),
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
        step(plan_of(tmp_path, num_tasks=3, num_shards=3, dedup=DedupConfig(0.7, bands=3))).run()
    assert sorted(tmp_path.rglob("*")) == before
