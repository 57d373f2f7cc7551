"""Bringing documents into an order of their own: every document into the shard of its key, each shard sorted."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from .minhash import band_hashes
from .progress import Meter
from .shingles import shingle_sets
from .work_folder import WorkFolder, complete_file, save_array

SCHEMA = pa.schema(
    [
        ("key", pa.binary(16)),
        ("source", pa.string()),
        ("file", pa.string()),
        ("row", pa.int64()),
        ("id", pa.string()),
        ("text", pa.large_string()),
    ]
)
PLACE = ("source", "file", "row", "id")
BUFFER_BYTES = 64 * 2**20  # of text that a task holds before it writes
BATCH_BYTES = 8 * 2**20  # of text that is shingled or tokenized at once


def document_key(text: str) -> bytes:
    """What identifies a document: the 128-bit xxHash of its text, 16 bytes.

    It decides the document's place in the corpus and its split, so that neither depends on file names, the order of
    the input or the number of workers; and a corpus in this order is shuffled.
    """
    return xxhash.xxh3_128_digest(text.encode("utf-8"))


def id_hash(source: str, name: str) -> int:
    """64 bits that stand for an id which a document brought with it."""
    return xxhash.xxh3_64_intdigest(f"{source}\0{name}".encode())


class ScatterDocuments(PipelineStep):
    """End of the first stage: each document goes to the shard of its key.

    Args:
        root: of the work folder.
        num_shards: a shard holds an equal part of the range of keys.
    """

    type = "WRITER"
    name = "scatter to shards"

    def __init__(self, root: Path, num_shards: int) -> None:
        super().__init__()
        self.folder, self.num_shards = WorkFolder(root), num_shards

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Write all documents of the task; files get their names when the last document is written."""
        rows, held, part = defaultdict(list), 0, 0
        ids = []
        for document in data:
            place = document.metadata
            if document.id != f"{place['file']}:{place['row']}":
                ids.append(id_hash(place["source"], document.id))
            key = document_key(document.text)
            row = (key, place["source"], place["file"], place["row"], document.id, document.text)
            rows[shard_of(key, self.num_shards)].append(row)
            held += len(document.text)
            self.stat_update("documents")
            self.stat_update("characters", value=len(document.text))
            if held >= BUFFER_BYTES:
                self._write(rows, rank, part)
                rows, held, part = defaultdict(list), 0, part + 1
        self._write(rows, rank, part)
        save_array(self.folder.path("ids", f"{rank:05d}.npy"), np.array(ids, dtype=np.uint64))

    def _write(self, rows: dict[int, list[tuple]], rank: int, part: int) -> None:
        for shard, held in rows.items():
            columns = dict(zip(SCHEMA.names, map(list, zip(*held, strict=True)), strict=True))
            with complete_file(self.folder.path("cleaned", shard, f"{rank:05d}_{part:05d}.parquet")) as path:
                pq.write_table(pa.table(columns, schema=SCHEMA), path, compression="zstd", compression_level=1)


def shard_of(key: bytes, num_shards: int) -> int:
    """Which of `num_shards` equal ranges of keys holds `key`."""
    return int.from_bytes(key[:4], "big") * num_shards >> 32


class SortShard(PipelineStep):
    """Sort a shard by key, drop copies, and compute what the search for near-duplicates needs.

    Of equal texts the one with the first source, file and row (by name) stays.

    Args:
        root: of the work folder.
        bands, rows, ngram: of the MinHash; `bands` 0 where near-duplicates are kept.
    """

    type = "SORT"
    name = "sort by key"

    def __init__(self, root: Path, bands: int, rows: int, ngram: int) -> None:
        super().__init__()
        self.folder, self.bands, self.rows, self.ngram = WorkFolder(root), bands, rows, ngram

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Task `rank` sorts shard `rank`."""
        files = sorted(self.folder.path("cleaned", rank).glob("[0-9]*.parquet"))
        table = pa.concat_tables([SCHEMA.empty_table(), *(pq.read_table(file) for file in files)])
        table = table.sort_by([(name, "ascending") for name in ("key", "source", "file", "row")])
        keys = _key_array(table)
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = keys[1:] != keys[:-1]
        copies = table.filter(pa.array(~is_first)).select(["key", *PLACE])
        with complete_file(self.folder.shard_file("sorted", rank, "copies.parquet")) as path:
            pq.write_table(copies, path, compression="zstd")
        table = table.filter(pa.array(is_first))
        with complete_file(self.folder.shard_file("sorted", rank, "parquet")) as path:
            pq.write_table(table, path, compression="zstd", compression_level=1, row_group_size=2048)
        lengths = pc.utf8_length(table["text"]).to_numpy().astype(np.int64)
        if self.bands:
            self._write_bands(table["text"], rank, world_size)
        # Last: this file tells the other stages how many documents the shard has.
        save_array(self.folder.shard_file("lengths", rank), lengths)
        self.stat_update("documents", value=len(table))
        self.stat_update("copies", value=len(copies))

    def _write_bands(self, texts: pa.ChunkedArray, rank: int, world_size: int) -> None:
        result = np.empty((len(texts), self.bands), dtype=np.uint64, order="F")
        first = 0
        with Meter(self.folder, "sort", rank) as meter:
            for batch in batches(texts):
                values, offsets = shingle_sets(batch, self.ngram)
                result[first : first + len(batch)] = band_hashes(values, offsets, self.bands, self.rows)
                first += len(batch)
                meter.add(len(batch), sum(map(len, batch)))
        save_array(self.folder.shard_file("bands", rank), result)


def batches(texts: pa.ChunkedArray) -> Iterator[list[str]]:
    """`texts` in order, in lists of about BATCH_BYTES."""
    held, size = [], 0
    for text in texts:
        held.append(text.as_py())
        size += len(held[-1])
        if size >= BATCH_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _key_array(table: pa.Table) -> np.ndarray:
    """The keys as bytes [documents] of 16 each, comparable with one another."""
    joined = b"".join(table["key"].to_pylist())
    return np.frombuffer(joined, dtype="V16").copy() if joined else np.empty(0, dtype="V16")
