"""Near-duplicates from band hashes: candidate pairs, exact similarity, clusters, survivors and causes of removal.

Documents are numbered from 0. Ties are broken by number, so the result depends on the numbering. If documents are
numbered by a hash of their text, the result does not depend on the order of the input.
"""

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, dijkstra

from .shingles import offsets_of, starts_run

BLOCK_VALUES = 2**17  # shingles that `exact_jaccard` sorts at once: they fit a core's cache unless one pair has more


def candidate_pairs(band: np.ndarray, largest_bucket: int = 1000) -> tuple[np.ndarray, int]:
    """Find pairs of documents with equal hashes in one band.

    A bucket holds the documents of one hash. In buckets of up to `largest_bucket` documents every pair is a candidate.
    The number of pairs grows with the square of the size, so in a larger bucket each document is paired only with the
    previous document and with the first one.

    Args:
        band: uint64 [documents], one column of `band_hashes`.
        largest_bucket: number of documents up to which all pairs are candidates, at least 2.

    Returns:
        pairs: int64 [pairs, 2], (i, j) with i < j, distinct, ascending;
        num_large: number of buckets of more than `largest_bucket` documents.
    """
    order = np.argsort(band, kind="stable")  # ascending within a bucket
    hashes = band[order]
    begins = np.flatnonzero(starts_run(hashes))
    sizes = np.diff(np.append(begins, len(band)))
    place = np.arange(len(band)) - np.repeat(begins, sizes)  # of a document in its bucket
    is_large = np.repeat(sizes > largest_bucket, sizes)
    partners = np.where(is_large, np.minimum(place, 2), place)
    later = np.repeat(np.arange(len(band)), partners)
    back = np.arange(len(later)) - np.repeat(np.cumsum(partners) - partners, partners) + 1  # 1, 2, ... for each
    to_first = (back == 2) & is_large[later]
    earlier = np.where(to_first, later - place[later], later - back)
    pairs = np.stack([order[earlier], order[later]], axis=1)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))], int((sizes > largest_bucket).sum())


def exact_jaccard(values: np.ndarray, offsets: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Compute the Jaccard similarity of the shingle sets of each pair: size of the intersection over the union.

    Args:
        values: uint64 [total], shingles, ascending and distinct within each document.
        offsets: int64 [documents + 1], index in `values` at which each document begins.
        pairs: int64 [pairs, 2].

    Returns:
        float64 [pairs]; 0 if both sets are empty.
    """
    sizes = np.diff(offsets)[pairs]  # [pairs, 2]
    common = np.zeros(len(pairs), dtype=np.int64)
    ends = np.cumsum(sizes.sum(axis=1))
    start = 0
    while start < len(pairs):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + BLOCK_VALUES)))
        common[start:end] = _num_common(values, offsets, pairs[start:end])
        start = end
    return common / np.maximum(sizes.sum(axis=1) - common, 1)


def _num_common(values: np.ndarray, offsets: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Count the common shingles of each pair, int64 [pairs]: sort both sets together and count equal neighbours."""
    begins, ends = offsets[:-1][pairs].tolist(), offsets[1:][pairs].tolist()
    sizes = np.diff(offsets)[pairs].sum(axis=1)
    borders = offsets_of(sizes)
    both = np.empty(borders[-1], dtype=np.uint64)
    for place, end, (begin_i, begin_j), (end_i, end_j) in zip(
        borders[:-1].tolist(), borders[1:].tolist(), begins, ends, strict=True
    ):
        middle = place + end_i - begin_i
        both[place:middle] = values[begin_i:end_i]
        both[middle:end] = values[begin_j:end_j]
        both[place:end].sort()
    is_common = ~starts_run(both)
    is_common[borders[:-1][sizes > 0]] = False
    return np.diff(offsets_of(is_common)[borders])


def clusters(num_documents: int, pairs: np.ndarray) -> np.ndarray:
    """Find the connected components of the graph with edges `pairs`.

    Args:
        num_documents: number of vertices.
        pairs: int64 [pairs, 2], in any order.

    Returns:
        int64 [documents]: the smallest document of each document's component.
    """
    if num_documents == 0:
        return np.empty(0, dtype=np.int64)
    _, component = connected_components(_graph(num_documents, pairs), directed=False)
    _, smallest = np.unique(component, return_index=True)
    return smallest[component]


def choose_survivors(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Choose the document to keep in each cluster: the longest, with ties broken by the smallest number.

    Args:
        labels: int64 [documents], from `clusters`.
        lengths: [documents], text lengths in characters.

    Returns:
        bool [documents], True for documents to keep.
    """
    order = np.lexsort((-np.asarray(lengths, dtype=np.int64), labels))
    keep = np.zeros(len(labels), dtype=bool)
    keep[order[starts_run(labels[order])]] = True
    return keep


def causes(
    labels: np.ndarray, keep: np.ndarray, pairs: np.ndarray, jaccard: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find, for each removed document, the pair that connects it to its cluster's survivor.

    The cause of a removal is the document before it on a path from the survivor over the fewest pairs; ties go to the
    most similar document, then to the smallest number.

    Args:
        labels: int64 [documents], from `clusters` of the same pairs.
        keep: bool [documents], True once per cluster.
        pairs: int64 [pairs, 2].
        jaccard: float64 [pairs].

    Returns:
        removed: int64 [removed], ascending; because_of: int64 [removed]; jaccard: float64 [removed], of the two.
    """
    source, target = np.concatenate([pairs, pairs[:, ::-1]]).T
    if len(source) == 0:
        return source, target, np.empty(0)
    graph, survivors = _graph(len(labels), pairs), np.flatnonzero(keep)
    distance = dijkstra(graph, directed=False, indices=survivors, unweighted=True, min_only=True)
    assert np.isfinite(distance).all(), "a cluster has no survivor, or is not connected"
    is_step = distance[source] + 1 == distance[target]
    source, target, similarity = source[is_step], target[is_step], np.tile(jaccard, 2)[is_step]
    order = np.lexsort((source, -similarity, target))
    best = order[starts_run(target[order])]
    return target[best], source[best], similarity[best]


def _graph(num_documents: int, pairs: np.ndarray) -> csr_array:
    return csr_array((np.ones(len(pairs), dtype=bool), tuple(pairs.T)), shape=(num_documents, num_documents))
