"""Documents of all tasks, distributed over shards and sorted by key."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from input_files import plan_of

from lmscale.corpus import collecting
from lmscale.corpus.collecting import CheckIds, ScatterDocuments, SortShard, document_key

NUM_SHARDS = 7


def scatter(root: Path, texts: list[list[str]]) -> None:
    """Run one task of the first stage per list; a document's id is its text."""
    for task, some in enumerate(texts):
        metadata = [{"source": "s", "file": f"{task}.txt", "row": row} for row in range(len(some))]
        documents = (Document(text, text, metadata=place) for text, place in zip(some, metadata, strict=True))
        ScatterDocuments(plan_of(root, num_tasks=len(texts), num_shards=NUM_SHARDS)).run(documents, task, len(texts))


@pytest.mark.parametrize("buffer_bytes", [1, 40, 10**6])
def test_shards_hold_all_documents_in_the_order_of_their_keys(tmp_path, monkeypatch, buffer_bytes) -> None:
    monkeypatch.setattr(collecting, "BUFFER_BYTES", buffer_bytes)
    texts = [f"text {n}" for n in range(40)]
    scatter(tmp_path, [texts[:25], [], texts[25:]])
    found = []
    for shard in range(NUM_SHARDS):
        SortShard(plan_of(tmp_path, num_tasks=3, num_shards=NUM_SHARDS)).run(rank=shard, world_size=NUM_SHARDS)
        found += pq.read_table(tmp_path / "sorted" / f"{shard:05d}.parquet")["text"].to_pylist()
    assert found == sorted(texts, key=document_key)


def test_a_flush_of_the_buffer_writes_one_file_for_all_shards(tmp_path) -> None:
    scatter(tmp_path, [[f"text {n}" for n in range(40)]] * 2)
    names = sorted(path.name for path in (tmp_path / "cleaned").iterdir())
    assert names == ["00000_00000.arrow", "00001_00000.arrow"]


def test_a_repeated_id_is_shown_with_its_places(tmp_path) -> None:
    scatter(tmp_path, [["a", "b"], ["c", "b"]])
    with pytest.raises(ValueError, match="1 documents share an id .*: 'b' in 0.txt row 1 and 1.txt row 1"):
        CheckIds(plan_of(tmp_path, num_tasks=2, duplicate_ids="refuse")).run()


def test_equal_ids_in_two_sources_are_not_repeated(tmp_path) -> None:
    for task, source in enumerate(("books", "news")):
        document = Document("text", "1", metadata={"source": source, "file": "a.jsonl", "row": 1})
        ScatterDocuments(plan_of(tmp_path, num_tasks=2)).run(iter([document]), task, 2)
    CheckIds(plan_of(tmp_path, num_tasks=2, duplicate_ids="refuse")).run()


def test_of_equal_texts_the_first_by_source_is_kept_whatever_the_names_of_the_files(tmp_path) -> None:
    plan = plan_of(tmp_path, num_tasks=1)
    places = [{"source": source, "file": file, "row": 1} for source, file in (("news", "a.txt"), ("books", "z.txt"))]
    ScatterDocuments(plan).run(iter([Document("text", "1", metadata=place) for place in places]))
    SortShard(plan).run()
    assert pq.read_table(tmp_path / "sorted" / "00000.parquet")["source"].to_pylist() == ["books"]
