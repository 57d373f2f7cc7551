"""Distribute documents over shards by a hash of their text, and sort each shard by that hash."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from datatrove.data import DocumentsPipeline

from ..data.sentences import by_size
from ..shared_files import replacing
from .minhash import band_hashes
from .progress import Meter
from .shingles import shingle_sets, starts_run
from .work_folder import WorkFolder, WorkStep, save_array, save_table

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
BUFFER_BYTES = 64 * 2**20  # of text buffered per task before writing
BATCH_BYTES = 8 * 2**20  # of text shingled or tokenized at once, unless one document has more
GROUP_ROWS = 2048  # documents


def document_key(text: str) -> bytes:
    """Return the key of a document: the 128-bit xxHash of its text, 16 bytes.

    The key determines the document's position in the corpus and its split, so neither depends on file names, input
    order or number of workers. A corpus in key order is shuffled.
    """
    return xxhash.xxh3_128_digest(text.encode("utf-8"))


def id_hash(source: str, name: str) -> int:
    """Return a 64-bit hash of a document id given by its source."""
    return xxhash.xxh3_64_intdigest(f"{source}\0{name}".encode())


class ScatterDocuments(WorkStep):
    """Last step of the first stage: write documents by the shard of their key, one batch per shard.

    With a file per shard and flush, 174 GB of text would make 1.8 million files.
    """

    name = "scatter to shards"

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Write all documents of the task; files are renamed to their final names when complete."""
        rows, held, part = defaultdict(list), 0, 0
        ids = []
        for document in data:
            place = document.metadata
            if document.id != f"{place['file']}:{place['row']}":
                ids.append(id_hash(place["source"], document.id))
            key = document_key(document.text)
            row = (key, place["source"], place["file"], place["row"], document.id, document.text)
            rows[shard_of(key, self.work.num_shards)].append(row)
            held += len(document.text)
            self.stat_update("documents")
            self.stat_update("characters", value=len(document.text))
            if held >= BUFFER_BYTES:
                self._write(rows, rank, part)
                rows, held, part = defaultdict(list), 0, part + 1
        self._write(rows, rank, part)
        save_array(self.work.shard_file("ids", rank), np.array(ids, dtype=np.uint64))

    def _write(self, rows: dict[int, list[tuple]], rank: int, part: int) -> None:
        # Arrow's own format finds a batch among hundreds much faster than parquet finds a row group.
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
        with (
            replacing(self.work.path("cleaned", f"{rank:05d}_{part:05d}.arrow")) as path,
            pa.ipc.new_file(str(path), SCHEMA, options=options) as writer,
        ):
            for shard in range(self.work.num_shards):
                columns = list(map(list, zip(*rows[shard], strict=True))) or [[] for _ in SCHEMA]
                writer.write_batch(pa.record_batch(columns, schema=SCHEMA))


def shard_of(key: bytes, num_shards: int) -> int:
    """Return the index of the key range, of `num_shards` equal ones, that contains `key`."""
    return int.from_bytes(key[:4], "big") * num_shards >> 32


def check_ids(work: WorkFolder, rank: int) -> dict[str, int]:
    """Count documents whose id occurs more than once in their source, or raise an error.

    Raises:
        ValueError: the policy is `refuse` and ids repeat (the message shows one of them and its locations), or a
            task of the first stage is not complete.
    """
    files = work.task_files("ids", stage="clean", num_tasks=work.num_tasks)
    ids = np.concatenate([np.empty(0, dtype=np.uint64), *map(np.load, files)])
    unique, counts = np.unique(ids, return_counts=True)
    surplus = len(ids) - len(unique)
    if surplus and work.config.duplicate_ids == "refuse":
        example = _example(work, int(unique[np.argmax(counts > 1)]))
        raise ValueError(f"`duplicate_ids` is refuse, but {surplus} documents share an id with another: {example}")
    return {"duplicate_ids": surplus}


def _example(work: WorkFolder, wanted: int) -> str:
    found = []
    options = pa.ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index(name) for name in PLACE])
    for path in sorted(work.path("cleaned").glob("[0-9]*.arrow")):
        with pa.OSFile(str(path)) as file:
            rows = pa.ipc.open_file(file, options=options).read_all().to_pylist()
        for row in rows:
            if id_hash(row["source"], row["id"]) == wanted:
                found.append(f"{row['file']} row {row['row']}")
                name = row["id"]
    return f"{name!r} in {' and '.join(sorted(found)[:3])}"


def sort_shard(work: WorkFolder, rank: int) -> dict[str, int]:
    """Sort a shard by key, drop exact copies, and compute MinHash bands for the near-duplicate search.

    Of several equal texts, the first by source, file and row is kept.

    Raises:
        ValueError: a task of the first stage is not complete.
    """
    work.task_files("ids", stage="clean", num_tasks=work.num_tasks)  # each writes its ids last
    found = []
    for path in sorted(work.path("cleaned").glob("[0-9]*.arrow")):
        with pa.OSFile(str(path)) as file:
            found.append(pa.ipc.open_file(file).get_batch(rank))
    table = pa.Table.from_batches(found, SCHEMA)
    table = table.sort_by([(name, "ascending") for name in ("key", "source", "file", "row")])
    is_first = starts_run(np.array(table["key"].to_pylist(), dtype="V16"))
    copies = table.filter(pa.array(~is_first)).select(["key", *PLACE])
    save_table(work.shard_file("sorted", rank, "copies.parquet"), copies)
    table = table.filter(pa.array(is_first))
    with replacing(work.shard_file("sorted", rank, "parquet")) as path:
        _write_groups(table, path)
    lengths = pc.utf8_length(table["text"]).to_numpy().astype(np.int64)
    if work.config.dedup.jaccard is not None:
        _write_bands(work, table["text"], rank)
    # Written last: the other stages read the shard's number of documents from this file.
    save_array(work.shard_file("lengths", rank), lengths)
    return {"documents": len(table), "copies": len(copies)}


def _write_bands(work: WorkFolder, texts: pa.ChunkedArray, rank: int) -> None:
    dedup, first = work.config.dedup, 0
    result = np.empty((len(texts), dedup.bands), dtype=np.uint64, order="F")
    with Meter(work, "sort", rank) as meter:
        for batch in batches(texts):
            values, offsets = shingle_sets(batch, dedup.ngram)
            result[first : first + len(batch)] = band_hashes(values, offsets, dedup.bands, dedup.rows)
            first += len(batch)
            meter.add(len(batch), sum(map(len, batch)))
    save_array(work.shard_file("bands", rank), result)


def _write_groups(table: pa.Table, path: Path) -> None:
    """Write a shard in row groups of at most GROUP_ROWS documents and about BATCH_BYTES, which are read one by one."""
    ends = np.cumsum(pc.binary_length(table["text"]).to_numpy())
    start = 0
    with pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=1) as writer:
        while start < len(table):
            before = ends[start - 1] if start else 0
            end = int(np.searchsorted(ends, before + BATCH_BYTES)) + 1
            end = min(end, start + GROUP_ROWS, len(table))
            writer.write_table(table.slice(start, end - start), row_group_size=GROUP_ROWS)
            start = end


def batches(texts: pa.ChunkedArray) -> Iterator[list[str]]:
    """Yield `texts` in order, in lists of about BATCH_BYTES."""
    return by_size((text.as_py() for text in texts), len, BATCH_BYTES)
