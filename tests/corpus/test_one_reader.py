"""`data=local`, `prepare_data`, evaluation sets, zero-shot and prompts read the same files by the same rules."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from input_files import archive, read, source

from lmscale.config.corpus import EvaluationSetConfig
from lmscale.config.data import DataConfig
from lmscale.corpus.evaluation_sets import read_evaluation_sets
from lmscale.corpus.inputs import list_inputs, list_skipped
from lmscale.data.sources import open_corpus
from lmscale.evaluation.prompts import read_prompts
from lmscale.text.whole_file import read_text_file


def local(path: Path, **more: object) -> list[str]:
    """Documents of `data=local`."""
    return open_corpus(DataConfig("local", 8, path=str(path), **more)).read()[0]


def prepared(path: Path, **more: object) -> list[str]:
    """Documents of `prepare_data`."""
    return [document.text for document in read(path, **{"undecodable": "refuse"} | more)[0]]


READERS = pytest.mark.parametrize("documents", [local, prepared])
WHOLE_FILE_READERS = pytest.mark.parametrize(
    "text",
    [
        lambda path: "\n\n".join(local(path)),
        lambda path: "\n\n".join(prepared(path)),
        lambda path: read_text_file(path, "task.path").text.removesuffix("\n"),
        lambda path: "\n".join(text for _, text in read_prompts(path)),
        lambda path: read_evaluation_sets({"w": EvaluationSetConfig("wikitext", str(path))})["w"][0],
    ],
    ids=["local", "prepare_data", "zero_shot", "generate", "evaluation_sets"],
)


@WHOLE_FILE_READERS
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_byte_order_mark_is_stripped_and_unicodes_other_separators_end_no_line(folder, text: Callable, pack) -> None:
    path = folder / {bytes: "a.txt", gzip.compress: "a.txt.gz"}.get(pack, "a.txt.zst")
    path.write_bytes(pack("\ufeff = A = \r\n\r\nb\u2028c\u0085d\x0be\x0cf\r\n".encode()))
    assert text(path).lstrip() == " = A = \n\nb\u2028c\u0085d\x0be\x0cf".lstrip()


@WHOLE_FILE_READERS
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"], ids=["LF", "CRLF", "CR", "CRCRLF"])
def test_lines_end_as_on_every_system(folder, text: Callable, end: str) -> None:
    (folder / "a.txt").write_bytes(end.join(["\ufeff = A = ", "b", "", "c", ""]).encode())
    assert text(folder / "a.txt").lstrip() == "= A = \nb\n\nc"


@READERS
def test_lines_of_an_archive_and_of_json_end_as_on_every_system(folder, documents: Callable) -> None:
    (folder / "a.tar").write_bytes(archive({"m": b"a\rb\r\rc\r"}))
    (folder / "b.jsonl").write_bytes(b'{"text": "d"}\r{"text": "e\\rf"}\r\r\n\n{"text": "g"}')
    assert documents(folder) == ["a\nb\n\nc", "d", "e\rf", "g"]


@WHOLE_FILE_READERS
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_with_and_without_a_mark_is_refused(folder, text: Callable, encoding: str) -> None:
    (folder / "a.txt").write_bytes(" = A = \nwords of a text\n".encode(encoding))
    rule = "has a zero byte, as UTF-16 has; iconv" if "-" in encoding[4:] else "begins with UTF-16"
    with pytest.raises(ValueError, match=f"a.txt.*{rule}") as caught:
        text(folder / "a.txt")
    assert "\n" not in str(caught.value)


@READERS
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.tar"])
def test_zero_bytes_are_refused_whatever_is_done_with_undecodable_bytes(folder, documents: Callable, name: str) -> None:
    content = b'{"text": "Hello"}\n' + '{"text": "w"}'.encode("utf-16-le")
    (folder / name).write_bytes(archive({"b.txt": content}) if name == "a.tar" else content)
    for policy in ("refuse", "replace", "fall_back"):
        with pytest.raises(ValueError, match=f"{name}.*has a zero byte"):
            documents(folder, undecodable=policy)


def hub(path: Path) -> list[str]:
    """Documents of `data=huggingface`."""
    return open_corpus(DataConfig("huggingface", 8, name=str(path), cache_dir=str(path / "cache"))).read()[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("documents", [local, prepared, hub])
def test_zero_characters_of_decoded_text_are_refused_too(folder, documents: Callable, name: str, monkeypatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder.with_name("cache"))
    if name == "a.jsonl":
        (folder / name).write_bytes(b'{"text": "fine"}\n{"text": "a\\u0000b"}\n')
    else:
        pq.write_table(pa.table({"text": ["fine", "a\0b"]}), folder / name)
    with pytest.raises(ValueError, match="row 2: `text` must be text, but has a zero character; prepare_data.py skips"):
        documents(folder)


def test_rows_with_zero_characters_can_be_skipped_and_are_counted(folder) -> None:
    (folder / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "a\\u0000b"}\n')
    documents, entries = read(folder, max_bad_rows=1)
    assert [document.text for document in documents] == ["fine"]
    assert entries[0]["problems"] == {"zero_characters": {"count": 1, "first_row": 2}}


def test_zero_characters_of_a_prompt_are_refused(folder) -> None:
    (folder / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "a\\u0000b"}\n')
    with pytest.raises(ValueError, match="`file` must have .* without zero characters .*, but a.jsonl, line 2 has one"):
        read_prompts(folder / "a.jsonl")


@READERS
@pytest.mark.parametrize(
    "ids",
    [
        [pa.array(["x", "y"])] * 2,
        [pa.array([1, 2**62], pa.duration("s"))],
        [pa.array([2**30, 2], pa.date32())],
        [pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"b"], pa.binary()).buffers())],
    ],
    ids=["twice", "durations", "dates", "not_utf8"],
)
def test_a_parquet_column_id_that_is_no_id_stops_nothing(folder, documents: Callable, ids: list[pa.Array]) -> None:
    columns = [pa.array(["one", "two"]), *ids]
    pq.write_table(pa.Table.from_arrays(columns, names=["text"] + ["id"] * len(ids)), folder / "a.parquet")
    more = {"undecodable": "fall_back"} if pa.types.is_string(ids[0].type) else {}
    assert documents(folder, **more) == ["one", "two"]


@READERS
def test_a_parquet_file_with_two_columns_of_text_is_refused(folder, documents: Callable) -> None:
    column = pa.array(["one", "two"])
    pq.write_table(pa.Table.from_arrays([column, column], names=["text", "text"]), folder / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: must have one column text, but has 2$"):
        documents(folder)


@READERS
@pytest.mark.parametrize("name", ["a.txt", "A.TXT", "a.md", "a.tokens", "a.txt.gz", "a.txt.zst", "a.tar", "a.tgz"])
def test_the_formats_of_texts_are_one_list(folder, documents: Callable, name: str) -> None:
    content = b"one\n\ntwo\n"
    if ".t" in name and name.endswith(("tar", "tgz")):
        content = archive({"b": b"one", "c": b"two"})
    pack = {"z": gzip.compress, "t": zstandard.compress}[name[-1]] if name.endswith(("gz", "zst")) else bytes
    (folder / name).write_bytes(pack(content))
    assert documents(folder) == ["one", "two"]
    assert documents(folder / name) == ["one", "two"]


@READERS
def test_a_line_of_any_spaces_ends_a_document(folder, documents: Callable) -> None:
    (folder / "a.txt").write_text("一。\n\u3000\n二。\n\u00a0\t\nthree\n\u3000four\n \n")
    assert documents(folder) == ["一。", "二。", "three\n\u3000four"]


@READERS
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet"])
def test_a_row_without_text_is_refused_with_its_number(folder, documents: Callable, name: str) -> None:
    content = b'{"text": "one"}\n{"text": null}\n'
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": ["one", None]}), folder / name)
    rule = (
        rf"{name}, row 2: must have a string `text` .text_field., but is .*; \S+\.text_field=NAME takes another field"
    )
    with pytest.raises(ValueError, match=rule):
        documents(folder)


@READERS
@pytest.mark.parametrize("content", ['[{"text": "one"}]', '[\n {\n  "text": "one"\n }\n]'])
def test_a_json_array_is_refused_with_the_command_that_splits_it(folder, documents: Callable, content: str) -> None:
    (folder / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json: must be one JSON object per line, .* array; pandas\.read_json"):
        documents(folder)


def test_the_items_of_an_evaluation_set_are_read_alike_and_no_key_is_proposed_that_it_lacks(folder) -> None:
    hide(folder)
    config = {"set": EvaluationSetConfig("records", str(folder))}
    assert read_evaluation_sets(config) == {"set": ["one", "two"]}
    (folder / "w.tokens").write_text(" = A = \n\n one \n\n = = B = = \n\n two \n\n = C = \n\n three \n")
    articles = read_evaluation_sets({"set": EvaluationSetConfig("wikitext", str(folder / "w.tokens"))})["set"]
    assert [article.split()[1] for article in articles] == ["A", "C"] and "two" in articles[0]
    for name, content in (("b.txt", b"caf\xe9"), ("c.jsonl", b'{"text": "\\ud800"}'), ("d.jsonl", b"{}")):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}, row 1: must [^;]*$"):
            read_evaluation_sets({"set": EvaluationSetConfig("records", str(folder / name))})


@READERS
def test_bytes_that_are_not_utf8_follow_the_same_three_policies(folder, documents: Callable) -> None:
    (folder / "a.txt").write_bytes("café\n\n".encode() + b"\x93caf\xe9\x94\n\n\x81caf\xe9")
    assert documents(folder, undecodable="fall_back") == ["café", "“café”", "\x81café"]
    assert documents(folder, undecodable="replace") == ["café", "\ufffdcaf\ufffd", "\ufffdcaf\ufffd"]
    with pytest.raises(ValueError, match=r"a\.txt, row 3: must be UTF-8, but byte 0 is 0x93; .*undecodable=replace"):
        documents(folder, undecodable="refuse")


def hide(folder: Path) -> None:
    """A corpus of one text among what tools leave behind, a table and a linked folder."""
    (folder / "a.txt").write_text("one\n\ntwo")
    for name in ("._a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".git/x.txt", ".git/y.txt", "b/.hidden.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("copy\n\ncopy")
    (folder / "table.csv").write_text("text\nwords\n")
    (folder / "read.me").write_text("words")
    (folder.with_name("elsewhere")).mkdir()
    (folder.with_name("elsewhere") / "c.txt").write_text("elsewhere")
    (folder / "link").symlink_to(folder.with_name("elsewhere"))


SKIPPED = (
    "skipped: hidden 4 (the first is ._a.txt), linked folders 1 (the first is link), "
    "other types 2 (the first is read.me)"
)


def test_hidden_files_and_folders_are_left_out_and_counted(folder) -> None:
    hide(folder)
    corpus = open_corpus(DataConfig("local", 8, path=str(folder)))
    assert corpus.read()[0] == prepared(folder) == ["one", "two"]
    assert corpus.skipped == f"data.path: {SKIPPED}"
    assert list_skipped({"books": source(folder)}) == [f"sources.books.path: {SKIPPED}"]


def test_a_hidden_file_that_is_named_is_read(folder) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / ".a.txt").write_text("one")
    for path in (folder / ".cache" / ".a.txt", folder / ".cache"):
        if path.is_file():
            assert local(path) == prepared(path) == ["one"]
        (folder / ".cache" / "b.txt").write_text("two")
    assert local(folder / ".cache") == prepared(folder / ".cache") == ["two"]


def test_hidden_members_are_counted(folder) -> None:
    (folder / "a.tar").write_bytes(archive({"a": b"one", "._a": b"\0", ".b": b"two"}))
    documents, entries = read(folder)
    assert [document.text for document in documents] == ["one"]
    assert entries[0]["problems"] == {"hidden_members": {"count": 2, "first_row": 2}}
    _, notes = open_corpus(DataConfig("local", 8, path=str(folder))).read()
    assert notes["problems"] == {"hidden_members": 2}


@pytest.mark.parametrize(
    "name, advice",
    [
        ("a.csv", "save its text as .jsonl or .parquet"),
        ("a.TSV", "save its text as .jsonl or .parquet"),
        ("a.txt.xz", "unpack it, or pack it as .gz or .zst"),
        ("a.zip", "unpack it, or pack it as .gz or .zst"),
        ("a.rst", "if it is plain text, rename it to .txt"),
    ],
)
def test_a_file_of_another_type_is_refused_with_what_can_be_done(folder, name: str, advice: str) -> None:
    (folder / name).write_text("words\n")
    for path in (folder / name, folder):
        for key, listed in (
            ("sources.books.path", lambda path=path: list_inputs({"books": source(path)})),
            ("data.path", lambda path=path: open_corpus(DataConfig("local", 8, path=str(path)))),
        ):
            with pytest.raises(ValueError, match=rf"`{key}` must .* \.txt, .*, but .*{name}.*{advice}") as caught:
                listed()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.tar", "a.txt.bz2"])
def test_prompts_and_evaluation_files_must_be_text(folder, name: str) -> None:
    (folder / name).write_text("words\n")
    for listed in (lambda: read_prompts(folder / name), lambda: read_text_file(folder / name, "file")):
        with pytest.raises(ValueError, match=rf"`file` must be a text file, but is .*{name}"):
            listed()


def test_packed_files_are_read_by_every_reader(folder) -> None:
    (folder / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "one"}\n'))
    assert [text for _, text in read_prompts(folder / "p.jsonl.gz")] == ["one"]
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"words of a text\n" * 50)[:-8])
    with pytest.raises(ValueError, match=r"`file` must be a file that can be read, but .*cut\.txt\.gz"):
        read_prompts(folder / "cut.txt.gz")
