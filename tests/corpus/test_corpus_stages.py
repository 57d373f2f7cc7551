"""The stages of a preparation, each alone, and the local executor: a killed worker and a failing task."""

import itertools
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from input_files import source, work_of

from lmscale.config.corpus import DedupConfig, EvaluationSetConfig, PrepareConfig
from lmscale.corpus import collecting, deduplicating, finalizing, running
from lmscale.corpus.collecting import ScatterDocuments, check_ids, document_key, sort_shard
from lmscale.corpus.deduplicating import compare_candidates, shingle_candidates
from lmscale.corpus.evaluation_sets import EVALUATION_TEXTS, evaluation_index
from lmscale.corpus.finalizing import merge_shards
from lmscale.corpus.opening import open_work_folder
from lmscale.corpus.running import QuietLocalExecutor
from lmscale.corpus.work_folder import WorkFolder, save_array, save_json

NUM_SHARDS = 7


def scatter(root: Path, texts: list[list[str]]) -> None:
    """Run one task of the first stage per list; a document's id is its text."""
    for task, some in enumerate(texts):
        metadata = [{"source": "s", "file": f"{task}.txt", "row": row} for row in range(len(some))]
        documents = (Document(text, text, metadata=place) for text, place in zip(some, metadata, strict=True))
        ScatterDocuments(work_of(root, num_tasks=len(texts), num_shards=NUM_SHARDS)).run(documents, task, len(texts))


@pytest.mark.parametrize("buffer_bytes", [1, 40, 10**6])
def test_shards_hold_all_documents_in_the_order_of_their_keys(tmp_path, monkeypatch, buffer_bytes) -> None:
    monkeypatch.setattr(collecting, "BUFFER_BYTES", buffer_bytes)
    texts = [f"text {n}" for n in range(40)]
    scatter(tmp_path, [texts[:25], [], texts[25:]])
    found = []
    for shard in range(NUM_SHARDS):
        sort_shard(work_of(tmp_path, num_tasks=3, num_shards=NUM_SHARDS), shard)
        found += pq.read_table(tmp_path / "sorted" / f"{shard:05d}.parquet")["text"].to_pylist()
    assert found == sorted(texts, key=document_key)


def test_a_flush_of_the_buffer_writes_one_file_for_all_shards(tmp_path) -> None:
    scatter(tmp_path, [[f"text {n}" for n in range(40)]] * 2)
    names = sorted(path.name for path in (tmp_path / "cleaned").iterdir())
    assert names == ["00000_00000.arrow", "00001_00000.arrow"]


def test_a_repeated_id_is_shown_with_its_places(tmp_path) -> None:
    scatter(tmp_path, [["a", "b"], ["c", "b"]])
    with pytest.raises(ValueError, match="1 documents share an id .*: 'b' in 0.txt row 1 and 1.txt row 1"):
        check_ids(work_of(tmp_path, num_tasks=2, duplicate_ids="refuse"), 0)


def test_equal_ids_in_two_sources_are_not_repeated(tmp_path) -> None:
    for task, name in enumerate(("books", "news")):
        document = Document("text", "1", metadata={"source": name, "file": "a.jsonl", "row": 1})
        ScatterDocuments(work_of(tmp_path, num_tasks=2)).run(iter([document]), task, 2)
    check_ids(work_of(tmp_path, num_tasks=2, duplicate_ids="refuse"), 0)


def test_of_equal_texts_the_first_by_source_is_kept_whatever_the_names_of_the_files(tmp_path) -> None:
    work = work_of(tmp_path, num_tasks=1)
    places = [{"source": source, "file": file, "row": 1} for source, file in (("news", "a.txt"), ("books", "z.txt"))]
    ScatterDocuments(work).run(iter([Document("text", "1", metadata=place) for place in places]))
    sort_shard(work, 0)
    assert pq.read_table(tmp_path / "sorted" / "00000.parquet")["source"].to_pylist() == ["books"]


@pytest.fixture
def compared(tmp_path) -> WorkFolder:
    """Two shards of 20 and 13 documents with 1 to 60 shingles; every pair of them is a candidate of one band.

    The last document has a quarter of the shingles of the first.
    """
    work = work_of(tmp_path, num_tasks=0, num_shards=2, dedup=DedupConfig(0.25, bands=1))
    generator = np.random.default_rng(5)
    for shard, first, end in ((0, 0, 20), (1, 20, 33)):
        sets = [np.unique(generator.integers(0, 70, size)) for size in generator.integers(1, 60, end - first)]
        sets[shard and -1] = np.arange(100, 110 if shard else 140)
        save_array(work.shard_file("lengths", shard), np.zeros(end - first, dtype=np.int64))
        save_array(work.shard_file("sets", shard, "values.npy"), np.concatenate(sets).astype(np.uint64))
        save_array(work.shard_file("sets", shard, "offsets.npy"), np.cumsum([0, *map(len, sets)]))
        save_array(work.shard_file("sets", shard, "members.npy"), np.arange(first, end))
    save_array(work.path("pairs", 0, "00000.npy"), np.array(list(itertools.combinations(range(33), 2))))
    return work


def result(work: WorkFolder) -> list[list]:
    compare_candidates(work, 0)
    return [np.load(work.shard_file("similar", 0, f"{name}.npy")).tolist() for name in ("pairs", "jaccard")]


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_documents_compared_at_once_are_bounded_by_their_shingles(compared, monkeypatch, limit: int) -> None:
    whole, held, get_sets = result(compared), [], deduplicating._sets

    def measured(work: WorkFolder, documents: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, offsets = get_sets(work, documents, first)
        held.append((len(values), len(documents)))
        return values, offsets

    monkeypatch.setattr(deduplicating, "_sets", measured)
    monkeypatch.setattr(deduplicating, "SHINGLES_AT_ONCE", limit)
    assert result(compared) == whole and len(whole[0]) > 20
    assert min(whole[1]) == 0.25 and [0, 32] in whole[0]  # the threshold itself
    assert all(shingles <= limit or documents == 2 for shingles, documents in held)


def test_documents_of_equal_names_in_two_sources_are_counted_as_two(tmp_path) -> None:
    """A document that contains two items counts once."""
    work = work_of(tmp_path, num_tasks=1, evaluation_sets={"quiz": EvaluationSetConfig("records", path="quiz.jsonl")})
    save_json(work.path(EVALUATION_TEXTS), {"quiz": ["a b c d e f g h i", "1 2 3 4 5 6 7 8 9"]})
    save_array(work.shard_file("overlap", 0, "seen.npy"), evaluation_index(work).new_seen())
    found = [("books", "quiz/0"), ("books", "quiz/1"), ("news", "quiz/0")]
    rows = [{"source": source, "file": "a.txt", "row": 1, "item": item} for source, item in found]
    report = finalizing._leakage(work, pa.Table.from_pylist(rows))
    assert report["quiz"]["documents_removed"] == 2


STEPS = {
    "ids": ("ids", "clean", check_ids),
    "sort": ("ids", "clean", sort_shard),
    "shingles": ("members/00000", "candidates", shingle_candidates),
    "compare": ("pairs/00000", "candidates", compare_candidates),
    "join": ("overlap", "tokenize", merge_shards),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_after_an_incomplete_stage_raises_and_writes_nothing(name: str, tmp_path: Path) -> None:
    folder, stage, do = STEPS[name]
    for task in (0, 2):
        save_array(tmp_path / folder / f"{task:05d}.npy", np.empty(0, dtype=np.int64))
        (tmp_path / folder / f"{task:05d}.parquet").touch()
    (tmp_path / folder / ".00001.npy.77").touch()  # of a task that still runs
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"all 3 tasks of `{stage}` must be complete, .* has the files of 2"):
        do(work_of(tmp_path, num_tasks=3, num_shards=3, dedup=DedupConfig(0.7, bands=3)), 0)
    assert sorted(tmp_path.rglob("*")) == before


class FailAt(PipelineStep):
    """Task 1 is killed as by the out-of-memory killer, or raises; the others take a time."""

    type, name = "TEST", "fail"

    def __init__(self, how: str, seconds: float) -> None:
        super().__init__()
        self.how, self.seconds = how, seconds

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        if rank != 1:
            time.sleep(self.seconds)
        elif self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "raises":
            raise ValueError("task 1 is bad")


def executor(folder: Path, how: str, seconds: float = 0.0) -> QuietLocalExecutor:
    return QuietLocalExecutor([FailAt(how, seconds)], 5, 2, logging_dir=str(folder), start_method="spawn")


@pytest.mark.timeout(60)
def test_a_killed_worker_raises_and_the_next_run_continues(tmp_path) -> None:
    with pytest.raises(ValueError, match="one was killed .out of memory.*`launcher.workers`") as caught:
        executor(tmp_path, "killed").run()
    assert "\n" not in str(caught.value)
    executor(tmp_path, "nothing").run()
    assert len(list((tmp_path / "completions").iterdir())) == 5


@pytest.mark.timeout(60)
def test_a_task_that_raises_stops_the_other_workers(tmp_path) -> None:
    with pytest.raises(ValueError, match="task 1 is bad"):
        executor(tmp_path, "raises", 600.0).run()


def test_there_is_one_worker_for_each_core_that_the_process_may_use(tmp_path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(QuietLocalExecutor, "run", lambda self: started.append(self.workers))
    monkeypatch.setattr(running, "stages", lambda work: [SimpleNamespace(name="a", num_tasks=7, steps=[])])
    running.run_stages(work_of(tmp_path, num_tasks=1))
    assert started == [2]


def test_an_input_that_was_edited_since_the_first_attempt_is_another(tmp_path) -> None:
    path = tmp_path / "in" / "a.txt"
    path.parent.mkdir()
    path.write_text("one\n\ntwo")
    config = work_of(tmp_path / "out" / ".work", {"local": source(path)}).config
    open_work_folder(config)
    open_work_folder(config)
    path.write_text("one\n\nTWO")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="was started with other input files"):
        open_work_folder(config)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_plan_is_named(tmp_path, text: str) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    work = open_work_folder(work_of(tmp_path / "out" / ".work", {"local": source(tmp_path / "a.txt")}).config)
    work.path("plan.json").write_text(text)
    with pytest.raises(ValueError, match="`output` must hold a preparation .*/plan.json is damaged"):
        open_work_folder(work.config)


def test_another_policy_continues_a_preparation_that_refused_but_refuse_continues_no_other(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")

    def config(ids: str, bytes_: str) -> PrepareConfig:
        files = {"local": source(tmp_path / "a.txt", undecodable=bytes_)}
        return work_of(tmp_path / "out" / ".work", files, duplicate_ids=ids).config

    for policies in (("refuse", "refuse"), ("count", "refuse"), ("count", "replace")):
        open_work_folder(config(*policies))
    with pytest.raises(ValueError, match="was started with duplicate_ids='count' and not 'refuse'"):
        open_work_folder(config("refuse", "replace"))
    with pytest.raises(ValueError, match="was started with sources.local.undecodable='replace' and not 'refuse'"):
        open_work_folder(config("count", "refuse"))


def test_only_the_lines_of_the_sources_that_ask_for_it_are_joined(tmp_path) -> None:
    for name in ("books", "stories"):
        (tmp_path / f"{name}.txt").write_text("a\nb")
    sources = {name: source(tmp_path / f"{name}.txt", join_lines=name == "stories") for name in ("books", "stories")}
    _, join, _ = running._cleaning(work_of(tmp_path / "work", sources))
    rows = [Document(text="a\nb", id=name, metadata={"source": name}) for name in sources]
    assert [document.text for document in join.run(rows)] == ["a\nb", "a b"]
