"""Search for near-duplicates over all shards: candidates per band, exact comparison per shard, one global result."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .collecting import PLACE, batches
from .duplicates import candidate_pairs, causes, choose_survivors, clusters, exact_jaccard
from .progress import Meter
from .shingles import distinct, offsets_of, shingle_sets
from .work_folder import WorkFolder, save_array, save_table

PAIRS_AT_ONCE = 500_000
SHINGLES_AT_ONCE = 2**24  # in memory at once, 8 bytes each, unless one pair has more


def find_candidates(work: WorkFolder, rank: int) -> dict[str, int]:
    """One band of the LSH: find pairs of documents whose band hashes are equal."""
    shards = range(work.num_shards)
    columns = [np.load(work.shard_file("bands", s), mmap_mode="r")[:, rank] for s in shards]
    pairs, num_large = candidate_pairs(np.concatenate(columns), work.config.dedup.largest_bucket)
    first = work.first_documents()
    of_first = np.searchsorted(pairs[:, 0], first)
    members = distinct(pairs.ravel())
    of_members = np.searchsorted(members, first)
    for shard in shards:
        here = pairs[of_first[shard] : of_first[shard + 1]]
        save_array(work.path("pairs", shard, f"{rank:05d}.npy"), here)
        mine = members[of_members[shard] : of_members[shard + 1]]
        save_array(work.path("members", shard, f"{rank:05d}.npy"), mine)
    return {"candidates": len(pairs), "buckets_too_large": num_large}


def shingle_candidates(work: WorkFolder, rank: int) -> dict[str, int]:
    """Compute and store the shingles of a shard's documents that occur in any candidate pair.

    Raises:
        ValueError: the candidates of a band are missing.
    """
    files = work.task_files("members", rank, stage="candidates", num_tasks=work.config.dedup.bands)
    members = distinct(np.concatenate([np.empty(0, dtype=np.int64), *map(np.load, files)]))
    first = work.first_documents()[rank]
    texts = pq.read_table(work.shard_file("sorted", rank, "parquet"), columns=["text"])["text"]
    values, counts = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
    with Meter(work, "shingles", rank) as meter:
        for batch in batches(texts.take(pa.array(members - first))):
            some, offsets = shingle_sets(batch, work.config.dedup.ngram)
            values.append(some)
            counts.append(np.diff(offsets))
            meter.add(len(batch), sum(map(len, batch)))
    save_array(work.shard_file("sets", rank, "values.npy"), np.concatenate(values))
    save_array(work.shard_file("sets", rank, "offsets.npy"), offsets_of(np.concatenate(counts)))
    save_array(work.shard_file("sets", rank, "members.npy"), members)
    return {"documents": len(members)}


def compare_candidates(work: WorkFolder, rank: int) -> dict[str, int]:
    """Compute the exact Jaccard similarity of the pairs whose first document is in a shard; keep the similar pairs.

    Raises:
        ValueError: the candidates of a band are missing.
    """
    files = work.task_files("pairs", rank, stage="candidates", num_tasks=work.config.dedup.bands)
    pairs = np.concatenate([np.empty((0, 2), dtype=np.int64), *map(np.load, files)])
    first = work.first_documents()
    pairs = np.stack(np.divmod(distinct(pairs[:, 0] * first[-1] + pairs[:, 1]), first[-1] or 1), axis=1)
    similar, similarities = [np.empty((0, 2), dtype=np.int64)], [np.empty(0)]
    with Meter(work, "compare", rank) as meter:
        for some, documents in _chunks(work, pairs, first):
            values, offsets = _sets(work, documents, first)
            jaccard = exact_jaccard(values, offsets, np.searchsorted(documents, some))
            enough = jaccard >= work.config.dedup.jaccard
            similar.append(some[enough])
            similarities.append(jaccard[enough])
            meter.add(len(some), 0)
    save_array(work.shard_file("similar", rank, "pairs.npy"), np.concatenate(similar))
    save_array(work.shard_file("similar", rank, "jaccard.npy"), np.concatenate(similarities))
    return {"compared": len(pairs), "similar": sum(map(len, similar))}


def _chunks(work: WorkFolder, pairs: np.ndarray, first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the pairs that may be similar in order, in parts whose documents have at most SHINGLES_AT_ONCE shingles,
    with these documents.

    The similarity of two sets is at most the ratio of their sizes.
    """
    all_documents, sizes, start = distinct(pairs.ravel()), [np.empty(0, dtype=np.int64)], 0
    for _, offsets, places in _located(work, all_documents, first):
        sizes.append(offsets[places + 1] - offsets[places])
    sizes = np.concatenate(sizes)
    of_pairs = sizes[np.searchsorted(all_documents, pairs)]
    pairs = pairs[of_pairs.min(axis=1) / of_pairs.max(axis=1) >= work.config.dedup.jaccard]
    while start < len(pairs):
        some = pairs[start : start + PAIRS_AT_ONCE]
        documents = distinct(some.ravel())
        while len(some) > 1 and sizes[np.searchsorted(all_documents, documents)].sum() > SHINGLES_AT_ONCE:
            some = some[: len(some) // 2]
            documents = distinct(some.ravel())
        yield some, documents
        start += len(some)


def _sets(work: WorkFolder, documents: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shingles of `documents` (sorted numbers) in the form of `shingle_sets`."""
    parts, counts = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
    for shard, offsets, places in _located(work, documents, first):
        values = np.load(work.shard_file("sets", shard, "values.npy"), mmap_mode="r")
        parts += [values[offsets[p] : offsets[p + 1]] for p in places]
        counts.append(offsets[places + 1] - offsets[places])
    return np.concatenate(parts), offsets_of(np.concatenate(counts))


def _located(
    work: WorkFolder, documents: np.ndarray, first: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield, per shard that has some of `documents`, its number, the offsets of its sets, and their indices."""
    borders = np.searchsorted(documents, first)
    for shard in np.flatnonzero(np.diff(borders)).tolist():
        members = np.load(work.shard_file("sets", shard, "members.npy"), mmap_mode="r")
        offsets = np.load(work.shard_file("sets", shard, "offsets.npy"))
        yield shard, offsets, np.searchsorted(members, documents[borders[shard] : borders[shard + 1]])


def resolve_duplicates(work: WorkFolder, rank: int) -> dict[str, int]:
    """Find the clusters of near-duplicates, the document to keep in each, and for each other document the pair that
    removed it.

    A cluster is a connected component of similar pairs. The longest text is kept; ties go to the smallest key.
    """
    shards = range(work.num_shards)
    pairs = np.concatenate([np.load(work.shard_file("similar", s, "pairs.npy")) for s in shards])
    jaccard = np.concatenate([np.load(work.shard_file("similar", s, "jaccard.npy")) for s in shards])
    # Only documents that occur in a pair; from here on they are numbered by their position in `documents`.
    documents = distinct(pairs.ravel())
    local = np.searchsorted(documents, pairs)
    lengths = np.concatenate([np.load(work.shard_file("lengths", s)) for s in shards])[documents]
    labels = clusters(len(documents), local)
    keep = choose_survivors(labels, lengths)  # documents are in key order, so ties go to the smallest key
    removed, because_of, similarity = causes(labels, keep, local, jaccard)
    survivor = np.empty(len(documents), dtype=np.int64)
    survivor[labels[keep]] = np.flatnonzero(keep)
    which = {"removed": removed, "similar_to": because_of, "survivor": survivor[labels[removed]]}
    _report(work, documents, which, similarity)
    save_array(work.path("duplicates.npy"), documents[~keep])
    return {"clusters": len(np.unique(labels)), "removed": int((~keep).sum())}


def _report(work: WorkFolder, documents: np.ndarray, which: dict[str, np.ndarray], similarity: np.ndarray) -> None:
    """Write `duplicates.parquet`: one row per removed document, with its cluster's survivor and the pair.

    Args:
        which: int64 [removed], by the first part of a column's name: indices in `documents`.
    """
    places = _places(work, documents)
    columns = {
        f"{name}_{column}": places[column].take(pa.array(rows))
        for name, rows in which.items()
        for column in ("key", *PLACE)
    }
    columns["jaccard"] = pa.array(similarity)
    save_table(work.path("duplicates.parquet"), pa.table(columns))


def _places(work: WorkFolder, documents: np.ndarray) -> pa.Table:
    first = work.first_documents()
    borders = np.searchsorted(documents, first)
    tables = []
    for shard in range(work.num_shards):
        wanted = documents[borders[shard] : borders[shard + 1]] - first[shard]
        table = pq.read_table(work.shard_file("sorted", shard, "parquet"), columns=["key", *PLACE])
        tables.append(table.take(pa.array(wanted)))
    return pa.concat_tables(tables)
