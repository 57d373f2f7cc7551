"""The exact comparison over shards: its memory and its result."""

import itertools

import numpy as np
import pytest
from input_files import plan_of

from lmscale.config.corpus import DedupConfig
from lmscale.corpus import deduplicating
from lmscale.corpus.deduplicating import CompareCandidates
from lmscale.corpus.plan import save_array


@pytest.fixture
def compare(tmp_path) -> CompareCandidates:
    """Two shards of 20 and 13 documents with 1 to 60 shingles; every pair of them is a candidate of one band."""
    plan = plan_of(tmp_path, num_tasks=0, num_shards=2, dedup=DedupConfig(0.25, bands=1))
    generator = np.random.default_rng(5)
    for shard, first, end in ((0, 0, 20), (1, 20, 33)):
        sets = [np.unique(generator.integers(0, 70, size)) for size in generator.integers(1, 60, end - first)]
        save_array(plan.shard_file("lengths", shard), np.zeros(end - first, dtype=np.int64))
        save_array(plan.shard_file("sets", shard, "values.npy"), np.concatenate(sets).astype(np.uint64))
        save_array(plan.shard_file("sets", shard, "offsets.npy"), np.cumsum([0, *map(len, sets)]))
        save_array(plan.shard_file("sets", shard, "members.npy"), np.arange(first, end))
    save_array(plan.path("pairs", 0, "00000.npy"), np.array(list(itertools.combinations(range(33), 2))))
    return CompareCandidates(plan)


def result(compare: CompareCandidates) -> list[list]:
    compare.run()
    return [np.load(compare.plan.shard_file("similar", 0, f"{name}.npy")).tolist() for name in ("pairs", "jaccard")]


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_documents_compared_at_once_are_bounded_by_their_shingles(compare, monkeypatch, limit: int) -> None:
    whole, held, get_sets = result(compare), [], CompareCandidates._sets

    def measured(self, documents: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, offsets = get_sets(self, documents, first)
        held.append((len(values), len(documents)))
        return values, offsets

    monkeypatch.setattr(CompareCandidates, "_sets", measured)
    monkeypatch.setattr(deduplicating, "SHINGLES_AT_ONCE", limit)
    assert result(compare) == whole and len(whole[0]) > 20
    assert min(whole[1]) == 0.25  # the threshold itself
    assert all(shingles <= limit or documents == 2 for shingles, documents in held)
