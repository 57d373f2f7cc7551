"""Search for near-duplicates over all shards: candidates per band, exact comparison per shard, one global result."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import DocumentsPipeline

from .collecting import PLACE, batches
from .duplicates import candidate_pairs, causes, choose_survivors, clusters, exact_jaccard
from .plan import PlannedStep, save_array, save_table
from .progress import Meter
from .shingles import distinct, offsets_of, shingle_sets

PAIRS_AT_ONCE = 500_000
SHINGLES_AT_ONCE = 2**24  # in memory at once, 8 bytes each, unless one pair has more


class FindCandidates(PlannedStep):
    """One band of the LSH: find pairs of documents whose band hashes are equal."""

    name = "candidates"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Task `rank` processes band `rank` of all shards."""
        shards = range(self.plan.num_shards)
        columns = [np.load(self.plan.shard_file("bands", s), mmap_mode="r")[:, rank] for s in shards]
        pairs, num_large = candidate_pairs(np.concatenate(columns), self.plan.config.dedup.largest_bucket)
        first = self.plan.first_documents()
        of_first = np.searchsorted(pairs[:, 0], first)
        members = distinct(pairs.ravel())
        of_members = np.searchsorted(members, first)
        for shard in shards:
            here = pairs[of_first[shard] : of_first[shard + 1]]
            save_array(self.plan.path("pairs", shard, f"{rank:05d}.npy"), here)
            mine = members[of_members[shard] : of_members[shard + 1]]
            save_array(self.plan.path("members", shard, f"{rank:05d}.npy"), mine)
        self.stat_update("candidates", value=len(pairs))
        self.stat_update("buckets_too_large", value=num_large)


class ShingleCandidates(PlannedStep):
    """Compute and store the shingles of a shard's documents that occur in any candidate pair."""

    name = "shingles"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Task `rank` reads shard `rank`.

        Raises:
            ValueError: the candidates of a band are missing.
        """
        files = self.plan.task_files("members", rank, stage="candidates", num_tasks=self.plan.config.dedup.bands)
        members = distinct(np.concatenate([np.empty(0, dtype=np.int64), *map(np.load, files)]))
        first = self.plan.first_documents()[rank]
        texts = pq.read_table(self.plan.shard_file("sorted", rank, "parquet"), columns=["text"])["text"]
        values, counts = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        with Meter(self.plan, "shingles", rank) as meter:
            for batch in batches(texts.take(pa.array(members - first))):
                some, offsets = shingle_sets(batch, self.plan.config.dedup.ngram)
                values.append(some)
                counts.append(np.diff(offsets))
                meter.add(len(batch), sum(map(len, batch)))
        save_array(self.plan.shard_file("sets", rank, "values.npy"), np.concatenate(values))
        save_array(self.plan.shard_file("sets", rank, "offsets.npy"), offsets_of(np.concatenate(counts)))
        save_array(self.plan.shard_file("sets", rank, "members.npy"), members)
        self.stat_update("documents", value=len(members))


class CompareCandidates(PlannedStep):
    """Compute the exact Jaccard similarity of the pairs whose first document is in a shard; keep the similar pairs."""

    name = "exact comparison"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Task `rank` compares the pairs of shard `rank`.

        Raises:
            ValueError: the candidates of a band are missing.
        """
        files = self.plan.task_files("pairs", rank, stage="candidates", num_tasks=self.plan.config.dedup.bands)
        pairs = np.concatenate([np.empty((0, 2), dtype=np.int64), *map(np.load, files)])
        first = self.plan.first_documents()
        pairs = np.stack(np.divmod(distinct(pairs[:, 0] * first[-1] + pairs[:, 1]), first[-1] or 1), axis=1)
        similar, similarities = [np.empty((0, 2), dtype=np.int64)], [np.empty(0)]
        with Meter(self.plan, "compare", rank) as meter:
            for some, documents in self._chunks(pairs, first):
                values, offsets = self._sets(documents, first)
                jaccard = exact_jaccard(values, offsets, np.searchsorted(documents, some))
                enough = jaccard >= self.plan.config.dedup.jaccard
                similar.append(some[enough])
                similarities.append(jaccard[enough])
                meter.add(len(some), 0)
        save_array(self.plan.shard_file("similar", rank, "pairs.npy"), np.concatenate(similar))
        save_array(self.plan.shard_file("similar", rank, "jaccard.npy"), np.concatenate(similarities))
        self.stat_update("compared", value=len(pairs))
        self.stat_update("similar", value=sum(map(len, similar)))

    def _chunks(self, pairs: np.ndarray, first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pairs in order, in parts whose documents have at most SHINGLES_AT_ONCE shingles, with these
        documents.
        """
        all_documents, sizes, start = distinct(pairs.ravel()), [np.empty(0, dtype=np.int64)], 0
        for _, offsets, places in self._located(all_documents, first):
            sizes.append(offsets[places + 1] - offsets[places])
        sizes = np.concatenate(sizes)
        while start < len(pairs):
            some = pairs[start : start + PAIRS_AT_ONCE]
            documents = distinct(some.ravel())
            while len(some) > 1 and sizes[np.searchsorted(all_documents, documents)].sum() > SHINGLES_AT_ONCE:
                some = some[: len(some) // 2]
                documents = distinct(some.ravel())
            yield some, documents
            start += len(some)

    def _sets(self, documents: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shingles of `documents` (sorted numbers) in the form of `shingle_sets`."""
        parts, counts = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        for shard, offsets, places in self._located(documents, first):
            values = np.load(self.plan.shard_file("sets", shard, "values.npy"), mmap_mode="r")
            parts += [values[offsets[p] : offsets[p + 1]] for p in places]
            counts.append(offsets[places + 1] - offsets[places])
        return np.concatenate(parts), offsets_of(np.concatenate(counts))

    def _located(self, documents: np.ndarray, first: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield, per shard that has some of `documents`, its number, the offsets of its sets, and their indices."""
        borders = np.searchsorted(documents, first)
        for shard in np.flatnonzero(np.diff(borders)).tolist():
            members = np.load(self.plan.shard_file("sets", shard, "members.npy"), mmap_mode="r")
            offsets = np.load(self.plan.shard_file("sets", shard, "offsets.npy"))
            yield shard, offsets, np.searchsorted(members, documents[borders[shard] : borders[shard + 1]])


class ResolveDuplicates(PlannedStep):
    """Find the clusters of near-duplicates, the document to keep in each, and for each other document the pair that
    removed it.

    A cluster is a connected component of similar pairs. The longest text is kept; ties go to the smallest key.
    """

    name = "clusters"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """The only task."""
        shards = range(self.plan.num_shards)
        pairs = np.concatenate([np.load(self.plan.shard_file("similar", s, "pairs.npy")) for s in shards])
        jaccard = np.concatenate([np.load(self.plan.shard_file("similar", s, "jaccard.npy")) for s in shards])
        # Only documents that occur in a pair; from here on they are numbered by their position in `documents`.
        documents = distinct(pairs.ravel())
        local = np.searchsorted(documents, pairs)
        lengths = np.concatenate([np.load(self.plan.shard_file("lengths", s)) for s in shards])[documents]
        labels = clusters(len(documents), local)
        keep = choose_survivors(labels, lengths)  # documents are in key order, so ties go to the smallest key
        removed, because_of, similarity = causes(labels, keep, local, jaccard)
        self._report(documents, labels, keep, removed, because_of, similarity)
        save_array(self.plan.path("duplicates.npy"), documents[~keep])
        self.stat_update("clusters", value=len(np.unique(labels)))
        self.stat_update("removed", value=int((~keep).sum()))

    def _report(
        self,
        documents: np.ndarray,
        labels: np.ndarray,
        keep: np.ndarray,
        removed: np.ndarray,
        because_of: np.ndarray,
        similarity: np.ndarray,
    ) -> None:
        """Write `duplicates.parquet`: one row per removed document, with its cluster's survivor and the pair."""
        places = self._places(documents)
        survivor = np.empty(len(documents), dtype=np.int64)
        survivor[labels[keep]] = np.flatnonzero(keep)
        columns = {}
        for name, which in (("removed", removed), ("similar_to", because_of), ("survivor", survivor[labels[removed]])):
            for column in ("key", *PLACE):
                columns[f"{name}_{column}"] = places[column].take(pa.array(which))
        columns["jaccard"] = pa.array(similarity)
        save_table(self.plan.path("duplicates.parquet"), pa.table(columns))

    def _places(self, documents: np.ndarray) -> pa.Table:
        first = self.plan.first_documents()
        borders = np.searchsorted(documents, first)
        tables = []
        for shard in range(self.plan.num_shards):
            wanted = documents[borders[shard] : borders[shard + 1]] - first[shard]
            table = pq.read_table(self.plan.shard_file("sorted", shard, "parquet"), columns=["key", *PLACE])
            tables.append(table.take(pa.array(wanted)))
        return pa.concat_tables(tables)
