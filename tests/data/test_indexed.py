"""Indexed datasets: bitwise in Megatron-LM's format and readable by its code; every violation raises an error."""

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from corpora import add_documents, write_dataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lmscale.data import indexed_dataset, indexed_writer
from lmscale.data.indexed_dataset import DTYPES, HEADER, IndexedDataset
from lmscale.data.indexed_writer import IndexedWriter, best_dtype, merge

DOCUMENTS = [[[5, 6, 7], [8]], [], [[]], [[9, 10, 11, 12], [], [13, 14]], [[15]]]
SEVERAL = st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=4), max_size=6)


def plain_files(documents: list[list[list[int]]], letter: str, code: int) -> tuple[bytes, bytes]:
    """Write `.bin` and `.idx` with struct only, item by item."""
    tokens, sizes, pointers, borders = b"", b"", b"", struct.pack("<q", 0)
    count = 0
    for document in documents:
        for sequence in document:
            sizes += struct.pack("<i", len(sequence))
            pointers += struct.pack("<q", len(tokens))
            tokens += struct.pack(f"<{len(sequence)}{letter}", *sequence)
            count += 1
        borders += struct.pack("<q", count)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, count, len(documents) + 1)
    return tokens, head + sizes + pointers + borders


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def content(prefix: Path) -> list[list[list[int]]]:
    """A dataset's documents, read through every attribute."""
    dataset = IndexedDataset(prefix)
    borders, starts = dataset.document_indices.tolist(), dataset.pointers // dataset.dtype.itemsize
    return [
        [dataset.tokens[starts[i] : starts[i] + dataset.sizes[i]].tolist() for i in range(first, last)]
        for first, last in zip(borders[:-1], borders[1:], strict=True)
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=SEVERAL, chunk=st.sampled_from([2, indexed_writer.CHUNK]))
@example(documents=[[[1, 2]], [], [[3]]], chunk=2)  # at most one sequence each
def test_files_equal_those_of_a_plain_writer_and_round_trip(tmp_path, monkeypatch, documents, chunk) -> None:
    for module in (indexed_writer, indexed_dataset):
        monkeypatch.setattr(module, "CHUNK", chunk)
    prefix = write_dataset(tmp_path / "a", documents)
    assert files(prefix) == plain_files(documents, "H", 8)
    assert content(prefix) == documents
    dataset = IndexedDataset(prefix)
    flat = [token for document in documents for sequence in document for token in sequence]
    assert dataset.tokens.tolist() == flat and dataset.num_tokens == len(flat)
    assert (len(dataset), dataset.num_documents) == (sum(map(len, documents)), len(documents))
    starts = dataset.document_starts(np.arange(len(documents) + 1))
    sizes = [sum(map(len, document)) for document in documents]
    assert starts.tolist() == np.concatenate([[0], np.cumsum(sizes)]).tolist()
    assert dataset.document_sizes(0, len(documents)).tolist() == sizes


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(SEVERAL, min_size=1, max_size=4))
def test_a_merged_dataset_equals_one_written_at_once(tmp_path, parts) -> None:
    prefixes = [write_dataset(tmp_path / f"part{i}", documents) for i, documents in enumerate(parts)]
    merge(prefixes, tmp_path / "merged")
    at_once = write_dataset(tmp_path / "at_once", [document for documents in parts for document in documents])
    assert files(tmp_path / "merged") == files(at_once)


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")]
)
def test_every_token_type_of_the_format_is_read_and_written(tmp_path, code, letter) -> None:
    tokens, index = plain_files(DOCUMENTS, letter, code)
    (tmp_path / "a.bin").write_bytes(tokens)
    (tmp_path / "a.idx").write_bytes(index)
    assert content(tmp_path / "a") == DOCUMENTS
    assert files(write_dataset(tmp_path / "b", DOCUMENTS, DTYPES[code])) == (tokens, index)


def test_ids_take_two_bytes_below_a_vocabulary_of_65500_and_four_above() -> None:
    assert [best_dtype(size).name for size in (1, 30_522, 65_499, 65_500, 250_000)] == ["uint16"] * 3 + ["int32"] * 2


def megatron(script: str, *arguments: str) -> str:
    """What a script prints that may import megatron.core from the folder LMSCALE_MEGATRON_CORE."""
    folder = os.environ.get("LMSCALE_MEGATRON_CORE")
    if folder is None:
        pytest.skip("LMSCALE_MEGATRON_CORE is not set (pip install --no-deps --target FOLDER megatron-core==0.16.1)")
    environment = os.environ | {"PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_megatron_reads_the_same_tokens_and_writes_the_same_bytes(tmp_path) -> None:
    documents = [document for document in DOCUMENTS if document]
    dtypes = ("uint16", "int32")
    for dtype in dtypes:
        write_dataset(tmp_path / f"ours_{dtype}", documents, dtype)
    script = """if True:
        import sys, numpy, torch
        from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
        found = []
        for dtype in ("uint16", "int32"):
            dataset, theirs = IndexedDataset(f"{sys.argv[1]}/ours_{dtype}"), f"{sys.argv[1]}/theirs_{dtype}"
            builder = IndexedDatasetBuilder(theirs + ".bin", dtype=getattr(numpy, dtype))
            borders = dataset.document_indices.tolist()
            documents = [[dataset[i].tolist() for i in range(a, b)] for a, b in zip(borders[:-1], borders[1:])]
            for document in documents:
                for sequence in document:
                    builder.add_item(torch.tensor(sequence, dtype=torch.int64))
                builder.end_document()
            builder.finalize(theirs + ".idx")
            found.append(documents)
        print(found)
    """
    assert megatron(script, str(tmp_path)) == str([documents, documents])
    for dtype in dtypes:
        assert files(tmp_path / f"ours_{dtype}") == files(tmp_path / f"theirs_{dtype}")


def header(**changes) -> bytes:
    fields = {"magic": b"MMIDIDX\x00\x00", "version": 1, "code": 8, "sequences": 3, "documents": 3} | changes
    return HEADER.pack(*fields.values())


SIZES, POINTERS, BORDERS = struct.pack("<3i", 2, 0, 3), struct.pack("<3q", 0, 4, 4), struct.pack("<3q", 0, 1, 3)
GOOD = header() + SIZES + POINTERS + BORDERS
BAD = {
    "magic": (b"PK" + GOOD[2:], 10, r"the first 9 bytes must be b'MMIDIDX.*, but are b'PK"),
    "empty": (b"", 10, "the first 9 bytes must be"),
    "older format": (b"TNTIDX\x00\x00" + GOOD[8:], 10, "must be MMIDIDX, but is TNTIDX.*; preprocess"),
    "version": (header(version=2) + GOOD[34:], 10, "version must be 1, but is 2"),
    "code 0": (header(code=0) + GOOD[34:], 10, "must be from 1 to 8, but is 0"),
    "code 9": (header(code=9) + GOOD[34:], 10, "must be from 1 to 8, but is 9"),
    "short header": (GOOD[:20], 10, "header must have 34 bytes, but the file has 20"),
    "truncated": (GOOD[:-1], 10, "must take 94 bytes, but it is truncated: 93"),
    "trailing": (GOOD + b"\x00", 10, "must take 94 bytes, but it has bytes after its end: 95"),
    "multimodal": (GOOD + b"\x00" * 3, 10, "has a mode per sequence"),
    "short bin": (GOOD, 8, r"\.bin must have the 10 bytes of its .idx, but has 8"),
    "long bin": (GOOD, 12, r"\.bin must have the 10 bytes of its .idx, but has 12"),
    "odd bin": (GOOD, 11, "but has 11"),
    "other type": (header(code=4) + GOOD[34:], 20, "sequence 1 is at byte 4 and not 8"),
    "falling pointers": (header() + SIZES + struct.pack("<3q", 4, 0, 4) + BORDERS, 10, "sequence 0 is at byte 4"),
    "pointer with a gap": (header() + SIZES + struct.pack("<3q", 0, 4, 6) + BORDERS, 10, "2 is at byte 6 and not 4"),
    "negative size": (header() + struct.pack("<3i", 2, -1, 3) + POINTERS + BORDERS, 10, "but sequence 1 has one"),
    "first document": (header() + SIZES + POINTERS + struct.pack("<3q", 1, 1, 3), 10, "from 0 to 3, but goes from 1"),
    "last document": (header() + SIZES + POINTERS + struct.pack("<3q", 0, 1, 2), 10, "from 0 to 3, but goes from 0 to"),
    "documents whose difference overflows": (
        header(documents=5) + SIZES + POINTERS + struct.pack("<5q", 0, 2**63 - 1, -(2**63), -1, 3),
        10,
        "must not decrease, but does after entry 1",
    ),
    "falling documents": (
        header(documents=4) + SIZES + POINTERS + struct.pack("<4q", 0, 2, 1, 3),
        10,
        "must not decrease, but does after entry 1",
    ),
    "no documents": (header(documents=0) + SIZES + POINTERS, 10, "but is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_violates_the_format_raises_one_line(tmp_path, name) -> None:
    index, num_bytes, message = BAD[name]
    (tmp_path / "a.bin").write_bytes(b"\x01" * num_bytes)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(tmp_path / "a")
    assert "\n" not in str(caught.value) and str(tmp_path / "a") in str(caught.value)


@pytest.mark.parametrize("ticks", [True, False])  # in one tick of the file system's clock the time stays
def test_a_validated_dataset_is_validated_again_when_it_changes(tmp_path, ticks) -> None:
    modified = 1 if ticks else time.time()
    (tmp_path / "a.bin").write_bytes(b"\x01" * 10)
    (tmp_path / "a.idx").write_bytes(GOOD)
    os.utime(tmp_path / "a.idx", (modified, modified))
    assert IndexedDataset(tmp_path / "a").num_documents == IndexedDataset(tmp_path / "a").num_documents == 2
    (tmp_path / "a.idx").write_bytes(header() + SIZES + struct.pack("<3q", 0, 4, 6) + BORDERS)
    if not ticks:
        os.utime(tmp_path / "a.idx", (modified, modified))
    with pytest.raises(ValueError, match="2 is at byte 6 and not 4"):
        IndexedDataset(tmp_path / "a")


def test_tokens_that_are_lost_after_a_first_look_are_noticed(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", DOCUMENTS)
    os.utime(tmp_path / "a.idx", (1, 1))  # long ago: the index is not validated again
    num_bytes = IndexedDataset(prefix).num_tokens * 2
    os.truncate(tmp_path / "a.bin", num_bytes - 2)
    with pytest.raises(ValueError, match=f"must have the {num_bytes} bytes of its .idx, but has {num_bytes - 2}"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path, missing) -> None:
    prefix = write_dataset(tmp_path / "a", DOCUMENTS)
    Path(f"{prefix}.{missing}").unlink()
    with pytest.raises(ValueError, match=rf"a\.{missing} cannot be read: No such file"):
        IndexedDataset(prefix)


def test_ids_outside_the_dtype_are_never_written(tmp_path) -> None:
    writer = IndexedWriter(tmp_path / "a", "uint16")
    for wrong in (65_536, -1):
        with pytest.raises(AssertionError):
            add_documents(writer, [[[3, wrong]]])
    write_dataset(tmp_path / "d", DOCUMENTS, "int32")
    with pytest.raises(AssertionError):
        merge([write_dataset(tmp_path / "e", DOCUMENTS), tmp_path / "d"], tmp_path / "c")
    assert not list(tmp_path.glob("c*"))


def test_unfinished_output_never_looks_like_a_dataset(tmp_path) -> None:
    writer = IndexedWriter(tmp_path / "a", "uint16")
    add_documents(writer, [[[1, 2, 3]]])
    assert not {"a.bin", "a.idx"} & {path.name for path in tmp_path.iterdir()}
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="cannot be written: No such file or directory"):
        IndexedWriter(tmp_path / "nowhere" / "a", "uint16")


def _write_into_a_full_disk(prefix: str, num_documents: int, num_tokens: int, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        writer = IndexedWriter(prefix, "uint16")
        for _ in range(num_documents):
            add_documents(writer, [[np.arange(num_tokens) % 1000]])
        writer.finish()
    except ValueError as error:
        assert "cannot be written: File too large" in str(error), error
        return
    raise AssertionError("more was written than there is room for")


@pytest.mark.parametrize(
    ("num_documents", "num_tokens", "limit"),
    [(100, 50_000, 3_000_000), (20, 50_000, 1_999_000), (2000, 5, 30_000)],
    ids=["adding", "the rest of the tokens", "the index"],
)
def test_a_full_disk_raises_one_line_and_keeps_the_older_dataset(tmp_path, num_documents, num_tokens, limit) -> None:
    """A limit on file sizes replaces a full disk."""
    before = files(write_dataset(tmp_path / "a", DOCUMENTS))
    arguments = str(tmp_path / "a"), num_documents, num_tokens, limit
    process = get_context("fork").Process(target=_write_into_a_full_disk, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert files(tmp_path / "a") == before and len(list(tmp_path.iterdir())) == 2


def test_a_dataset_is_pickled_as_its_prefix(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", [[list(range(60_000))]])
    dataset = IndexedDataset(prefix)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens, dataset.tokens)


def test_the_writers_memory_does_not_grow_with_the_tokens(tmp_path) -> None:
    import tracemalloc

    document = [np.arange(50_000) % 1000]
    writer = IndexedWriter(tmp_path / "a", "uint16")
    add_documents(writer, [document])
    tracemalloc.start()
    for _ in range(200):  # 20 MB of tokens
        add_documents(writer, [document])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    writer.discard()
    assert held < 100_000
