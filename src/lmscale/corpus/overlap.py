"""Evaluation text in training documents: find the documents that contain it (section 4.1), measure it (section 5.2)."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..data.indexed_dataset import concatenate_ranges
from .shingles import distinct, starts_run, word_ngrams

BLOCK_ITEMS = 2**22  # (n-gram, item) pairs processed at once, unless one document has more
FILTER_SLOTS = 16  # bits of the filter per n-gram, for a false-positive rate of about 1/16
LARGEST_FILTER = 2**26  # bytes


class EvaluationIndex:
    """Index of the word n-grams of evaluation items, for lookup of training documents.

    An item of fewer than n words has no n-gram and cannot be checked. Shorter n-grams are not used instead, because
    common phrases would match everywhere.

    Args:
        sets: texts of the items by name of the set, which has no slash.
        n: words per n-gram.

    Attributes:
        names: `set/number` of each item; numbers count from 0 in each set.
        ngrams: uint64 [distinct n-grams], hashes, ascending; `seen` arrays use the same order.
        num_ngrams: int64 [items], number of distinct n-grams of each item; 0 if it cannot be checked.
    """

    def __init__(self, sets: Mapping[str, Sequence[str]], n: int = 8) -> None:
        self.n = n
        self.names = [f"{name}/{number}" for name, texts in sets.items() for number in range(len(texts))]
        self._set_sizes = {name: len(texts) for name, texts in sets.items()}
        values, self._offsets = word_ngrams([text for texts in sets.values() for text in texts], n)
        order = np.argsort(values)
        is_first = starts_run(values[order])
        self.ngrams = values[order][is_first]
        self._positions = np.empty(len(values), dtype=np.int64)
        self._positions[order] = np.cumsum(is_first) - 1
        self._filter_shift, self._filter = _build_filter(self.ngrams)
        self._items, self._first_item, self.num_ngrams = self._build_postings()

    def contaminates(
        self, values: np.ndarray, offsets: np.ndarray, threshold: float = 0.5
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the items of which a document contains at least `threshold` of the distinct n-grams.

        Args:
            values: uint64 [total], n-grams of the documents, from `word_ngrams` with this index's n.
            offsets: int64 [documents + 1], index in `values` at which each document begins.
            threshold: fraction of an item's distinct n-grams, above 0 and at most 1.

        Returns:
            document: int64 [found]; item: int64 [found], index in `names`; share: float64 [found], at least
            `threshold`. Ascending by document, then item.
        """
        places, ngrams = self._find(values)
        documents = np.searchsorted(offsets, places, side="right") - 1
        # An n-gram repeated in a document counts once.
        keys = distinct(documents * len(self.ngrams) + ngrams)
        documents, ngrams = np.divmod(keys, max(len(self.ngrams), 1))
        found = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))]
        for start, end in self._blocks(documents, ngrams):
            found.append(self._shares(documents[start:end], ngrams[start:end], threshold))
        document, item, share = (np.concatenate(column) for column in zip(*found, strict=True))
        return document, item, share

    def new_seen(self) -> np.ndarray:
        """Return bool [distinct n-grams], all False, for `mark_seen`; combine those of several shards with `|`."""
        return np.zeros(len(self.ngrams), dtype=bool)

    def mark_seen(self, values: np.ndarray, seen: np.ndarray) -> None:
        """Set in `seen`, in place, the evaluation n-grams among `values` (uint64, n-grams of training documents)."""
        seen[self._find(values)[1]] = True

    def overlap(self, seen: np.ndarray) -> dict[str, dict[str, float]]:
        """Measure how much of each set occurs in the training documents.

        Args:
            seen: bool [distinct n-grams], from `new_seen` and `mark_seen`.

        Returns:
            per set: `percent` of its n-grams, counted by position (an n-gram that occurs twice in the set counts
            twice), 0 if it has none; `ngrams` and `ngrams_found`, the two counts; `items` and
            `items_not_checkable`, those of fewer than n words.

        Source: section 5.2; GPT-2's section 4 also counts positions, with a Bloom filter.
        """
        report, first_item = {}, 0
        for name, num_items in self._set_sizes.items():
            items = slice(first_item, first_item + num_items)
            positions = self._positions[self._offsets[items.start] : self._offsets[items.stop]]
            num_found = int(seen[positions].sum())
            report[name] = {
                "percent": 100 * num_found / max(len(positions), 1),
                "ngrams": len(positions),
                "ngrams_found": num_found,
                "items": num_items,
                "items_not_checkable": int((self.num_ngrams[items] == 0).sum()),
            }
            first_item += num_items
        return report

    def _build_postings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the items of each n-gram, each n-gram's first index in them, and each item's distinct n-grams."""
        num_items = len(self.names)
        items = np.repeat(np.arange(num_items), np.diff(self._offsets))
        keys = distinct(self._positions * max(num_items, 1) + items)
        ngrams, items = np.divmod(keys, max(num_items, 1))
        first = np.searchsorted(ngrams, np.arange(len(self.ngrams) + 1))
        return items, first, np.bincount(items, minlength=num_items)

    def _find(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the evaluation n-grams among `values`: their indices in `values` and in `ngrams`."""
        places = np.flatnonzero(self._filter.take((values >> self._filter_shift).view(np.int64)))
        likely = values[places]
        ngrams = np.searchsorted(self.ngrams, likely)
        np.minimum(ngrams, len(self.ngrams) - 1, out=ngrams)
        is_match = self.ngrams[ngrams] == likely
        return places[is_match], ngrams[is_match]

    def _blocks(self, documents: np.ndarray, ngrams: np.ndarray) -> list[tuple[int, int]]:
        """Divide the found n-grams between documents into ranges with a bounded number of items."""
        ends = np.cumsum(self._first_item[ngrams + 1] - self._first_item[ngrams])
        bounds = np.append(np.flatnonzero(np.diff(documents)) + 1, len(documents)) if len(documents) else []
        ranges, start, before = [], 0, 0
        for end in np.asarray(bounds, dtype=np.int64).tolist():
            if ends[end - 1] - before >= BLOCK_ITEMS or end == len(documents):
                ranges.append((start, end))
                start, before = end, ends[end - 1]
        return ranges

    def _shares(
        self, documents: np.ndarray, ngrams: np.ndarray, threshold: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        counts = self._first_item[ngrams + 1] - self._first_item[ngrams]
        places = concatenate_ranges(self._first_item[ngrams], counts)
        keys = np.repeat(documents, counts) * len(self.names) + self._items[places]
        keys, num_found = np.unique(keys, return_counts=True)
        document, item = np.divmod(keys, len(self.names))
        share = num_found / self.num_ngrams[item]
        enough = share >= threshold
        return document[enough], item[enough], share[enough]


def _build_filter(ngrams: np.ndarray) -> tuple[np.uint64, np.ndarray]:
    """Build a bitmap over the first bits of the hashes, with few false positives; returns the shift and the bitmap."""
    bits = (min(max(len(ngrams) * FILTER_SLOTS, 2), LARGEST_FILTER) - 1).bit_length()
    shift = np.uint64(64 - bits)
    held = np.zeros(2**bits, dtype=bool)
    held[ngrams >> shift] = True
    return shift, held
