"""Faulty sources: what is counted, what raises an error, and its message."""

import gzip
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from input_files import TEXTS, archive, lines, pack, problems, read, source, work_of

from lmscale.config.data import DataConfig
from lmscale.corpus.inputs import list_inputs
from lmscale.corpus.reading import SourceReader, check_first_documents
from lmscale.data.prepare import check_corpus
from lmscale.text import formats


def test_parquet_text_that_is_not_utf8_follows_the_same_policy(folder) -> None:
    raw = pa.array([b"fine", b"caf\xe9", None], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": broken}), folder / "a.parquet")
    documents, entries = read(folder, max_bad_rows=1)
    assert [document.text for document in documents] == ["fine", "café"]
    assert problems(entries) == {"undecodable": [1, 2], "missing_text": [1, 3]}


def test_lone_surrogates_are_replaced_and_counted_and_pairs_are_characters(folder) -> None:
    (folder / "a.jsonl").write_text('{"text": "a \\ud83d\\ude00 b"}\n{"text": "a \\ud83d b"}\n')
    documents, entries = read(folder)
    assert [document.text for document in documents] == ["a 😀 b", "a \ufffd b"]
    assert problems(entries) == {"lone_surrogates": [1, 2]}
    with pytest.raises(ValueError, match=r"row 2: must be Unicode text, but has lone surrogates"):
        read(folder, undecodable="refuse")


BAD_ROWS = ["{", "[1]", "7", '{"txt": "x"}', '{"text": null}', '{"text": 5}', "[" * 100_000, "1" * 5000]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda bad: bad[:16])
def test_a_bad_row_raises_with_its_location_or_is_counted_below_the_limit(folder, bad) -> None:
    content = '{"text": "One."}\n\n' + bad + '\n{"text": "Two."}\n' + bad + "\n"
    (folder / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"a\.jsonl, row 3: must ") as caught:
        read(folder)
    message = str(caught.value).removeprefix(str(folder))
    assert "\n" not in message and len(message) < 300
    documents, entries = read(folder, max_bad_rows=2)
    assert [document.text for document in documents] == ["One.", "Two."]
    assert list(problems(entries).values()) == [[2, 3]]
    with pytest.raises(ValueError, match="row 5: .*; it is bad row 2 and `max_bad_rows` is 1"):
        read(folder, max_bad_rows=1)


def test_the_limit_applies_per_file_to_all_kinds_of_bad_rows(folder) -> None:
    (folder / "a.jsonl").write_text('{"text": "One."}\n{\n')
    (folder / "b.jsonl").write_text('{"text": "Two."}\n{"text": 5}\n')
    assert len(read(folder, max_bad_rows=1)[0]) == 2
    (folder / "b.jsonl").write_text('{"text": "Two."}\n{"text": 5}\n{\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, row 3"):
        read(folder, max_bad_rows=1)


def test_empty_documents_and_files_are_counted_and_skipped(folder) -> None:
    (folder / "a.jsonl").write_bytes(lines([{"text": " \n\t"}, {"text": "One."}, {"text": ""}]))
    for name in ("b.jsonl", "c.txt.gz", "d.parquet", "e.tar"):
        (folder / name).write_bytes(b"")
    pack(b"\n\n", folder / "f.txt.gz")
    documents, entries = read(folder)
    assert [document.text for document in documents] == ["One."]
    assert [list(entry["problems"]) for entry in entries] == [["empty_documents"], *[["empty_file"]] * 5]
    assert problems(entries[:1]) == {"empty_documents": [2, 1]}


def test_a_source_of_only_empty_files_raises(folder) -> None:
    for name in ("a.jsonl", "b.txt"):
        (folder / name).write_bytes(b"")
    with pytest.raises(ValueError, match="`sources` must hold text, but all 2 files are empty"):
        list_inputs({"books": source(folder)})


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.tar", "a.tar.gz", "a.tar.zst", "a.parquet"])
@pytest.mark.parametrize("share", [0.3, 0.95])
def test_a_truncated_file_raises_and_never_looks_complete(folder, name, share) -> None:
    # Random words keep the compressed files long enough to be cut anywhere.
    texts = [os.urandom(300).hex() for _ in range(200)]
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), folder / name)
    elif ".tar" in name:
        pack(archive({f"{i}.txt": text.encode() for i, text in enumerate(texts)}), folder / name)
    else:
        pack(lines([{"text": text} for text in texts]), folder / name)
    assert len(read(folder)[0]) == 200
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"a\.\S+:? must be a complete") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("blocks", range(1, 8))
def test_an_archive_truncated_between_two_members_raises(folder, blocks) -> None:
    # Each member is a header and one block of 512 bytes; truncation between blocks leaves no visible damage.
    content = archive({f"{i}.txt": b"word " * 100 for i in range(4)})
    (folder / "a.tar").write_bytes(content[: 512 * blocks])
    with pytest.raises(ValueError, match="must be a complete"):
        read(folder)


def test_all_frames_and_members_of_compressed_files_are_read(folder) -> None:
    parts = [lines([{"text": text}]) for text in TEXTS]
    (folder / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    (folder / "b.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    assert [document.text for document in read(folder)[0]] == [*TEXTS, *TEXTS]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.tar"])
def test_a_file_with_a_wrong_suffix_raises(folder, name) -> None:
    (folder / name).write_bytes(b"only text here, " * 100)
    with pytest.raises(
        ValueError, match=r"a\.\S+ must be a complete, readable file, but is not|must be a complete arch"
    ):
        read(folder)


def test_archives_of_compressed_or_structured_files_raise(folder) -> None:
    for member in ("x.jsonl", "x.parquet", "x.txt.gz", "x.xz"):
        (folder / "a.tar").write_bytes(archive({"first.txt": b"text", member: b"text"}))
        with pytest.raises(ValueError, match=f"must hold texts, but has {member}; unpack it first"):
            read(folder)


def test_links_in_an_archive_are_bad_rows_and_folders_are_skipped(folder) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/link", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            tar.addfile(info)
    assert problems(read(folder, max_bad_rows=1)[1]) == {"missing_text": [1, 1]}


def test_a_parquet_file_without_a_text_column_raises(folder) -> None:
    pq.write_table(pa.table({"content": ["x"], "n": [1]}), folder / "a.parquet")
    with pytest.raises(ValueError, match=r"`text_field` must be one of its columns \(content, n\), but is text"):
        read(folder)
    with pytest.raises(ValueError, match="column n must hold text, but holds int64"):
        read(folder, text_field="n")


def test_a_file_that_changed_since_it_was_listed_raises(folder) -> None:
    (folder / "a.jsonl").write_bytes(lines([{"text": "One."}]))
    sources = {"books": source(folder)}
    reader = SourceReader(work_of(folder.with_name("work"), sources))
    (folder / "a.jsonl").write_bytes(lines([{"text": "Other."}]))
    with pytest.raises(ValueError, match=r"a\.jsonl: must not change during the preparation"):
        list(reader.run())
    (folder / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl must be a complete, readable file, but is not: No such file"):
        list(reader.run())


def test_a_failed_task_writes_no_report(folder) -> None:
    (folder / "a.jsonl").write_bytes(lines([{"text": "One."}]))
    (folder / "b.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"b\.jsonl"):
        read(folder)
    assert not list(folder.with_name("work").glob("inputs/*"))


def test_missing_paths_and_folders_without_known_files_raise_before_reading(folder) -> None:
    with pytest.raises(ValueError, match=r"`sources\.books\.path` must be a file or a folder that can be read, but"):
        list_inputs({"books": source(folder / "nothing")})
    with pytest.raises(ValueError, match=r"`sources\.books\.path` must hold files ending in"):
        list_inputs({"books": source(folder)})
    (folder / "a.pdf").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"`sources\.books\.path` must end in"):
        list_inputs({"books": source(folder / "a.pdf")})


def test_file_names_that_are_not_utf8_become_text(folder) -> None:
    (Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt"))).write_text("One.")
    documents, _ = read(folder)
    assert documents[0].id == "caf\ufffd.txt:1"


def test_a_row_over_the_limit_raises_before_it_is_read(folder, monkeypatch) -> None:
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 1000)
    (folder / "a.jsonl").write_bytes(lines([{"text": "One."}, {"text": "x" * 2000}]))
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2 must be at most 1,000 bytes, but is longer"):
        read(folder)
    (folder / "a.jsonl").rename(folder / "a.txt")
    (folder / "a.txt").write_text("short\n\n" + "line of a block\n" * 100)
    with pytest.raises(ValueError, match=r"the text from line 3 must be at most"):
        read(folder)
    with pytest.raises(ValueError, match=r"the text must be at most"):
        read(folder, text_documents="file")


def test_links_without_target_and_pipes_are_named_and_never_opened(folder) -> None:
    (folder / "a.jsonl").write_text('{"text": "some text"}\n')
    for place, make, what in (
        (
            "b.txt",
            lambda path: path.symlink_to(folder / "gone"),
            f"b.txt is a link to {folder / 'gone'}, which does not",
        ),
        ("deep/c.jsonl", os.mkfifo, "c.jsonl is a pipe or device"),
    ):
        path = folder / place
        path.parent.mkdir(exist_ok=True)
        make(path)
        for listed in (
            lambda: list_inputs({"books": source(folder)}),
            lambda: check_corpus(DataConfig("local", 8, path=str(folder)), "gpt"),
        ):
            with pytest.raises(ValueError) as caught:
                listed()
            assert what in str(caught.value) and "\n" not in str(caught.value)
        path.unlink()
    (folder / "a_folder.txt").mkdir()
    (folder / "pipe").symlink_to(folder / "gone")  # of no known type: not read
    assert [file.name for file in list_inputs({"books": source(folder)})] == ["a.jsonl"]


def test_one_document_for_two_splits_is_refused_before_the_stages(folder) -> None:
    (folder / "a.jsonl").write_text('{"text": "some text"}\n\n{"text": " "}\n')
    (folder / "empty.txt").write_text("")
    sources = {"books": source(folder)}
    with pytest.raises(
        ValueError, match="`sources` must hold at least 2 documents, .*, but hold 1; a document of a text file ends"
    ):
        check_first_documents(list_inputs(sources), sources, 0)
    (folder / "b.txt").write_text("more text")
    check_first_documents(list_inputs(sources), sources, 0)
