"""Evaluation text in training documents: which documents hold it (section 4.1), and how much of it (section 5.2)."""

from collections.abc import Mapping, Sequence

import numpy as np

from .shingles import word_ngrams

BLOCK_ITEMS = 2**22  # (n-gram, item) pairs looked at once, unless one document has more
FILTER_SLOTS = 16  # of the bitmap, for each n-gram: one clean n-gram in 16 passes it
LARGEST_FILTER = 2**26  # bytes


class EvaluationIndex:
    """The word n-grams of evaluation items, to be looked up in training documents.

    An item of fewer than n words has no n-gram and cannot be checked: it is in `not_checkable`, never matched by a
    shorter n-gram, which common phrases would match everywhere.

    Args:
        sets: texts of the items for each set's name.
        n: words of an n-gram.

    Attributes:
        names: `set/number` of each item; numbers count from 0 in each set.
        ngrams: uint64 [distinct n-grams], hashes, ascending. What `seen` arrays refer to.
        num_ngrams: int64 [items], distinct n-grams of each item.
        not_checkable: int64 [items without n-grams], their places in `names`.

    Raises:
        ValueError: `n` is less than 1, or a set's name has a slash in it.
    """

    def __init__(self, sets: Mapping[str, Sequence[str]], n: int = 8) -> None:
        for name in sets:
            if "/" in name:
                raise ValueError(f"`name` of an evaluation set must have no slash in it, but is {name!r}")
        self.n = n
        self.names = [f"{name}/{number}" for name, texts in sets.items() for number in range(len(texts))]
        self._set_sizes = {name: len(texts) for name, texts in sets.items()}
        values, self._offsets = word_ngrams([text for texts in sets.values() for text in texts], n)
        order = np.argsort(values)
        is_first = _is_first(values[order])
        self.ngrams = values[order][is_first]
        self._positions = np.empty(len(values), dtype=np.int64)
        self._positions[order] = np.cumsum(is_first) - 1
        self._filter_shift, self._filter = _build_filter(self.ngrams)
        self._items, self._first_item, self.num_ngrams = self._build_postings()
        self.not_checkable = np.flatnonzero(self.num_ngrams == 0)

    def contaminates(
        self, values: np.ndarray, offsets: np.ndarray, threshold: float = 0.5
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items of which a document holds at least `threshold` of the distinct n-grams.

        Args:
            values: uint64 [total], n-grams of the documents, from `word_ngrams` with this index's n.
            offsets: int64 [documents + 1], where each document begins in `values`.
            threshold: share of an item's distinct n-grams, above 0 and at most 1.

        Returns:
            document: int64 [found]; item: int64 [found], place in `names`; share: float64 [found], at least
            `threshold`. Ascending by document, then item.

        Raises:
            ValueError: `threshold` is out of range.
        """
        if not 0 < threshold <= 1:
            raise ValueError(f"`threshold` must be above 0 and at most 1, but is {threshold}")
        places, ngrams = self._find(values)
        documents = np.searchsorted(offsets, places, side="right") - 1
        # An n-gram that a document repeats counts once.
        keys = distinct(documents * len(self.ngrams) + ngrams)
        documents, ngrams = np.divmod(keys, max(len(self.ngrams), 1))
        found = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))]
        for start, end in self._blocks(documents, ngrams):
            found.append(self._shares(documents[start:end], ngrams[start:end], threshold))
        document, item, share = (np.concatenate(column) for column in zip(*found, strict=True))
        return document, item, share

    def nothing_seen(self) -> np.ndarray:
        """bool [distinct n-grams], all false: for `mark_seen`. Those of several shards are joined by `|`."""
        return np.zeros(len(self.ngrams), dtype=bool)

    def mark_seen(self, values: np.ndarray, seen: np.ndarray) -> None:
        """Mark in `seen`, in place, the evaluation n-grams among `values` (uint64, n-grams of training documents)."""
        seen[self._find(values)[1]] = True

    def overlap(self, seen: np.ndarray) -> dict[str, dict[str, float]]:
        """How much of each set occurs in the training documents.

        Args:
            seen: bool [distinct n-grams], from `nothing_seen` and `mark_seen`.

        Returns:
            for each set: `percent` of its n-grams, counted by position (one that occurs twice in the set counts
            twice), 0 where it has none; `ngrams` and `ngrams_found`, the two counts; `items` and
            `items_not_checkable`, those of fewer than n words.

        Source: section 5.2; GPT-2's section 4 counts positions too, with a Bloom filter.
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
        """Items of each n-gram, where each n-gram's begin, and how many distinct n-grams each item has."""
        num_items = len(self.names)
        items = np.repeat(np.arange(num_items), np.diff(self._offsets))
        keys = distinct(self._positions * max(num_items, 1) + items)
        ngrams, items = np.divmod(keys, max(num_items, 1))
        first = np.searchsorted(ngrams, np.arange(len(self.ngrams) + 1))
        return items, first, np.bincount(items, minlength=num_items)

    def _find(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `values` are evaluation n-grams: their places in `values` and in `ngrams`."""
        places = np.flatnonzero(self._filter.take((values >> self._filter_shift).view(np.int64)))
        likely = values[places]
        ngrams = np.searchsorted(self.ngrams, likely)
        np.minimum(ngrams, len(self.ngrams) - 1, out=ngrams)
        is_one = self.ngrams[ngrams] == likely
        return places[is_one], ngrams[is_one]

    def _blocks(self, documents: np.ndarray, ngrams: np.ndarray) -> list[tuple[int, int]]:
        """Ranges of found n-grams, cut between documents, of bounded numbers of items."""
        ends = np.cumsum(self._first_item[ngrams + 1] - self._first_item[ngrams])
        borders = np.append(np.flatnonzero(np.diff(documents)) + 1, len(documents)) if len(documents) else []
        ranges, start, before = [], 0, 0
        for border in np.asarray(borders, dtype=np.int64).tolist():
            if ends[border - 1] - before >= BLOCK_ITEMS or border == len(documents):
                ranges.append((start, border))
                start, before = border, ends[border - 1]
        return ranges

    def _shares(
        self, documents: np.ndarray, ngrams: np.ndarray, threshold: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        counts = self._first_item[ngrams + 1] - self._first_item[ngrams]
        places = np.arange(counts.sum()) + np.repeat(self._first_item[ngrams] - (np.cumsum(counts) - counts), counts)
        keys = np.repeat(documents, counts) * len(self.names) + self._items[places]
        keys, num_found = np.unique(keys, return_counts=True)
        document, item = np.divmod(keys, len(self.names))
        share = num_found / self.num_ngrams[item]
        enough = share >= threshold
        return document[enough], item[enough], share[enough]


def distinct(keys: np.ndarray) -> np.ndarray:
    """`np.unique`, which since numpy 2.3 hashes integers and is many times slower on millions of them."""
    keys = np.sort(keys)
    return keys[_is_first(keys)]


def _is_first(ordered: np.ndarray) -> np.ndarray:
    """Where a value differs from the one before it."""
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return is_first


def _build_filter(ngrams: np.ndarray) -> tuple[np.uint64, np.ndarray]:
    """A bitmap over the first bits of the hashes, which passes few that are not in `ngrams`; by how much to shift."""
    bits = (min(max(len(ngrams) * FILTER_SLOTS, 2), LARGEST_FILTER) - 1).bit_length()
    shift = np.uint64(64 - bits)
    held = np.zeros(2**bits, dtype=bool)
    held[ngrams >> shift] = True
    return shift, held
