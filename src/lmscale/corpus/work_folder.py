"""Where the stages of a preparation leave their work for the next stage."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DOCUMENT_COLUMNS = ("key", "source", "file", "row", "id", "text")


@dataclass(frozen=True)
class WorkFolder:
    """Names of the files under `root`; shards are ranges of document keys, tasks are parts of the input.

    cleaned/<shard>/<task>.parquet      documents of a task that fall in a shard (DOCUMENT_COLUMNS)
    ids/<task>.npy                      hashes of the ids that documents brought with them
    sorted/<shard>.parquet              the shard's documents by key, copies left out
    sorted/<shard>.copies.parquet       places of the copies
    bands/<shard>.npy                   uint64 [documents, bands], Fortran order: a band is contiguous
    lengths/<shard>.npy                 int64 [documents], characters
    pairs/<shard>/<band>.npy            int64 [pairs, 2], candidates whose first document is in the shard
    members/<shard>/<band>.npy          int64, documents of the shard that are in any pair of the band
    sets/<shard>.{members,values,offsets}.npy   their shingles
    similar/<shard>.{pairs,jaccard}.npy pairs that are similar enough
    duplicates.npy                      int64, documents to leave out, sorted; duplicates.parquet: why
    tokens/<shard>/<source>_<split>.{bin,idx}
    logs/<stage>/                       datatrove's logs, statistics and completion marks
    progress/<stage>/<task>             documents and bytes so far

    Documents are numbered over all shards in order of their keys.
    """

    root: Path

    def path(self, *parts: object) -> Path:
        """The path of one of the files above: numbers are written with five digits."""
        names = [f"{part:05d}" if isinstance(part, int) else str(part) for part in parts]
        return self.root.joinpath(*names)

    def shard_file(self, kind: str, shard: int, ending: str = "npy") -> Path:
        """`<kind>/<shard>.<ending>`."""
        return self.root / kind / f"{shard:05d}.{ending}"

    def first_documents(self, num_shards: int) -> np.ndarray:
        """The number of each shard's first document and, last, how many there are; int64 [shards + 1]."""
        counts = [len(np.load(self.shard_file("lengths", shard), mmap_mode="r")) for shard in range(num_shards)]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    def duplicates(self) -> np.ndarray:
        """Numbers of the documents to leave out, sorted; empty where near-duplicates are kept."""
        path = self.path("duplicates.npy")
        return np.load(path) if path.is_file() else np.empty(0, dtype=np.int64)


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` at the end, so that a file of that name is always complete.

    A task that is stopped and run again writes the same file anew; two processes that run the same task have temporary
    names of their own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save` to a file that is never incomplete."""
    with complete_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array)
