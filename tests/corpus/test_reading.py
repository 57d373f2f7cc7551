"""Reading sources: formats, ids, memory, and Hugging Face datasets."""

import json
import pickle
import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_files import TEXTS, archive, lines, pack, problems, read, source, work_of

from lmscale.config.corpus import SourceConfig
from lmscale.corpus.inputs import list_inputs
from lmscale.corpus.reading import SourceReader


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "A.JSONL"])
def test_json_lines_are_read_plain_and_compressed(folder, name) -> None:
    pack(lines([{"text": text} for text in TEXTS]), folder / name)
    documents, entries = read(folder)
    assert [document.text for document in documents] == TEXTS
    assert [document.id for document in documents] == [f"{name}:{row}" for row in (1, 2, 3)]
    assert documents[1].metadata == {"source": "books", "file": name, "row": 2}
    assert entries[0]["documents"] == 3 and entries[0]["problems"] == {}


def test_a_text_file_can_be_one_document(folder) -> None:
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf\nOne.\n\nTwo.\n\n")
    documents, _ = read(folder, text_documents="file")
    assert [document.text for document in documents] == ["One.\n\nTwo."]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"])
def test_every_member_of_an_archive_is_a_document_with_its_name(folder, name) -> None:
    pack(archive({f"posts/{i}": text.encode() for i, text in enumerate(TEXTS)}), folder / name)
    documents, _ = read(folder)
    assert [(document.id, document.text) for document in documents] == [(f"posts/{i}", t) for i, t in enumerate(TEXTS)]


def test_the_folder_in_which_an_archive_was_made_is_not_hidden(folder) -> None:
    """As by `tar -c .`"""
    (folder / "a.tar").write_bytes(archive({"./a": b"one", "./b/c": b"two", "./.d": b"hidden", "./.e/f": b"hidden"}))
    documents, entries = read(folder)
    assert [document.text for document in documents] == ["one", "two"]
    assert problems(entries) == {"hidden_members": [2, 3]}


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_parquet_columns_of_every_text_type_are_read(folder, kind) -> None:
    texts = pa.array([*TEXTS * 50, TEXTS[0]]).cast(kind)
    pq.write_table(pa.table({"other": range(151), "text": texts, "id": range(1000, 1151)}), folder / "a.parquet")
    documents, _ = read(folder)
    assert [document.text for document in documents] == [*TEXTS * 50, TEXTS[0]]
    assert [document.id for document in documents] == [str(1000 + i) for i in range(151)]
    assert documents[-1].metadata["row"] == 151


def test_a_rows_id_is_used_only_if_it_is_a_text_or_number(folder) -> None:
    ids = ["x1", 17, "", None, True, 1.5, ["a"], "\ud800"]
    rows = [json.dumps({"text": "word", "id": name}) for name in ids]
    (folder / "a.jsonl").write_text("\n".join(rows))
    documents, _ = read(folder)
    assert [d.id for d in documents] == ["x1", "17", *(f"a.jsonl:{row}" for row in range(3, 8)), "\ufffd"]
    documents, _ = read(folder, text_field="id", max_bad_rows=9)  # it is the text then
    assert [(d.text, d.id) for d in documents] == [("x1", "a.jsonl:1"), ("\ufffd", "a.jsonl:8")]


def test_files_are_assigned_by_name_independently_of_their_order(folder) -> None:
    for name in ("c/1.jsonl", "a.jsonl", "b.jsonl", "c/0.jsonl", "d.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(lines([{"text": f"{name} {i}"} for i in range(3)]))
    (folder / "readme.rst").write_text("not a corpus")
    sources = {"books": source(folder)}
    inputs = list_inputs(sources)
    assert [file.name for file in inputs] == ["a.jsonl", "b.jsonl", "c/0.jsonl", "c/1.jsonl", "d.jsonl"]
    reader = SourceReader(work_of(folder.with_name("work"), sources))
    by_rank = [[d.text for d in reader.run(None, rank, 2)] for rank in range(2)]
    assert [text.split()[0] for text in by_rank[0]] == ["a.jsonl"] * 3 + ["c/0.jsonl"] * 3 + ["d.jsonl"] * 3
    assert len(by_rank[0]) + len(by_rank[1]) == 15


def test_a_reader_can_be_pickled(folder) -> None:
    (folder / "a.jsonl").write_bytes(lines([{"text": "One."}]))
    sources = {"books": source(folder)}
    reader = pickle.loads(pickle.dumps(SourceReader(work_of(folder.with_name("work"), sources))))
    assert [document.text for document in reader.run()] == ["One."]


def test_every_post_of_the_newsgroups_is_read_and_the_42_that_are_not_utf8_are_counted(shared_data, tmp_path) -> None:
    sources = {"posts": source(shared_data / "newsgroups" / "20_newsgroups.shared.tar.gz")}
    reader = SourceReader(work_of(tmp_path, sources))
    names = {document.id for document in reader.run()}
    entry = json.loads((tmp_path / "inputs" / "00000.json").read_text())[0]
    assert len(names) == entry["documents"] == 8997
    assert entry["problems"]["undecodable"]["count"] == 42
    crossposts = json.loads((shared_data / "newsgroups" / "crossposts.shared.json").read_text())
    assert all(f"20_newsgroups/{post}" in names for posts in crossposts for post in posts)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.gz", "a.tar.gz", "a.parquet"])
def test_a_large_file_is_streamed(folder, name) -> None:
    generator, count = random.Random(1), 500
    texts = [generator.randbytes(10_000).hex() for _ in range(count)]  # 10 MB
    if name.endswith(".parquet"):
        # Pages of 16 rows: a page is the smallest readable unit.
        pq.write_table(pa.table({"text": texts}), folder / name, use_dictionary=False, write_batch_size=16)
    elif ".tar" in name:
        pack(archive({f"{i}.txt": text.encode() for i, text in enumerate(texts)}), folder / name)
    elif ".txt" in name:
        pack("\n\n".join(texts).encode(), folder / name)
    else:
        pack(lines([{"text": text} for text in texts]), folder / name)
    sources = {"books": source(folder)}
    reader = SourceReader(work_of(folder.with_name("work"), sources))
    tracemalloc.start()
    assert sum(1 for _ in reader.run()) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


# Hugging Face datasets


@pytest.fixture
def dataset(tmp_path: Path) -> SourceConfig:
    """A dataset of three files in a folder."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for part in range(3):
        rows = [{"story": f"part {part} row {row}", "id": f"{part}-{row}"} for row in range(5 + part)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"train-{part:05d}-of-00003.parquet")
    return SourceConfig("huggingface", name=str(folder), text_field="story")


def test_a_dataset_is_read_part_by_part(dataset, tmp_path) -> None:
    sources = {"hub": dataset}
    inputs = list_inputs(sources)
    assert [file.name for file in inputs] == [f"stories/default/train/{part:05d}-of-00003" for part in range(3)]
    sizes = sorted(path.stat().st_size for path in Path(dataset.name).iterdir())
    assert sorted(file.num_bytes for file in inputs) == sizes
    reader = pickle.loads(pickle.dumps(SourceReader(work_of(tmp_path / "work", sources))))
    found = [[(d.id, d.text, d.metadata["row"]) for d in reader.run(None, rank, 3)] for rank in range(3)]
    assert found == [
        [(f"{part}-{row}", f"part {part} row {row}", row + 1) for row in range(5 + part)] for part in range(3)
    ]


def test_a_missing_dataset_or_column_raises(dataset, tmp_path) -> None:
    wrong = SourceConfig("huggingface", name=dataset.name, text_field="text")
    with pytest.raises(
        ValueError, match=r"`sources\.hub\.text_field` must be one of the dataset's columns \(story, id"
    ):
        list_inputs({"hub": wrong})
    for more in ({"split": "test"}, {"subset": "nothing"}):
        with pytest.raises(ValueError, match=r"`sources\.hub\.name` must be a dataset that can be streamed, but '"):
            list_inputs({"hub": SourceConfig("huggingface", name=dataset.name, text_field="story", **more)})
    with pytest.raises(ValueError, match=r"`sources\.hub\.name` must be a dataset that can be streamed") as caught:
        list_inputs({"hub": SourceConfig("huggingface", name="no-such/dataset")})
    assert "\n" not in str(caught.value)


def test_a_dataset_of_only_empty_files_raises(tmp_path) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "README.md").write_text("---\ndataset_info: {features: [{name: text, dtype: string}]}\n---\n")
    with pytest.raises(ValueError, match="`sources` must hold text, .* the first is .*/default/train/00000-of-00001$"):
        list_inputs({"hub": SourceConfig("huggingface", name=str(tmp_path))})


def test_a_damaged_part_of_a_dataset_raises_with_its_name(dataset, tmp_path) -> None:
    sources = {"hub": dataset}
    reader = SourceReader(work_of(tmp_path / "work", sources))
    path = sorted(Path(dataset.name).iterdir())[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"stories/default/train/00001-of-00003 must be a readable part of a dataset"):
        list(reader.run())


def test_rows_of_a_dataset_without_text_count_against_the_limit(dataset, tmp_path) -> None:
    path = sorted(Path(dataset.name).iterdir())[0]
    pq.write_table(pa.table({"story": ["One.", None, "Two."], "id": ["a", "b", "c"]}), path)
    sources = {"hub": dataset}
    with pytest.raises(ValueError, match=r"00000-of-00003, row 2: must have a string `story`"):
        list(SourceReader(work_of(tmp_path / "work", sources)).run())
    assert sum(1 for _ in SourceReader(work_of(tmp_path / "work", sources, max_bad_rows=1)).run()) == 2 + 6 + 7
