"""Which sentences make BERT's training samples: a table drawn once from the seed, over all documents at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np

from .indexed_dataset import IndexedDataset

LONGEST_SENTENCE = 512  # tokens; a document with a longer one is left out whole, as upstream does
_CHUNK = 1 << 16  # documents worked on together
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class TargetLengths:
    """How many tokens a sample is to have, a pure function of the seed and the sample's first sentence.

    Args:
        key: of the run's seed, 64 bits.
        longest: tokens of a full sample, at least 2.
        short_probability: how often the length is drawn evenly from 2..longest instead.
    """

    key: int
    longest: int
    short_probability: float

    def of(self, sentences: np.ndarray) -> np.ndarray:
        """Target lengths of the samples that begin with these sentences, int64 as shaped."""
        numbers = sentences.astype(np.uint64) * np.uint64(2)
        is_short = _uniform(self.key, numbers) < self.short_probability
        drawn = 2 + (_uniform(self.key, numbers + np.uint64(1)) * (self.longest - 1)).astype(np.int64)
        return np.where(is_short, drawn, self.longest)


def write_pairs(file: IO[bytes], dataset: IndexedDataset, first: int, last: int, lengths: TargetLengths) -> None:
    """Write the samples of the documents [first, last), in NumPy's format, in the order of their sentences.

    A sample takes sentences of one document until the target length is reached; the document's last two or more make
    one of whatever length. Left out are documents of one sentence, and those with a sentence of more than
    `LONGEST_SENTENCE` tokens.

    All documents of a chunk move on together: a binary search in the running sum of the sentences' sizes finds where
    each one's next sample ends, so there are as many passes as the longest document has samples.

    Shapes:
        written: rows (first sentence, sentence after the last, target length), uint32 [samples, 3], int64 where the
        sentences are more than 2^32.

    Source: Megatron-LM's `data/helpers.cpp`, build_mapping, without its reuse of one random number for the short
    length.
    """
    dtype = np.dtype("<u4" if len(dataset) < 2**32 else "<i8")
    _write_header(file, dtype, 0)
    begin, count = file.tell(), 0
    for starts, ends in usable_documents(dataset, first, last):
        rows = _pairs_of(dataset, starts, ends, lengths)
        file.write(rows.astype(dtype).data)
        count += len(rows)
    file.seek(0)
    _write_header(file, dtype, count)  # as long as before: NumPy leaves room for the number of rows to grow
    assert file.tell() == begin


def usable_documents(dataset: IndexedDataset, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of the documents [first, last) those with a pair of sentences and none too long, a chunk at a time.

    Yields:
        the sentence at which each begins and the one behind its last, int64 [documents of the chunk that can be used].
    """
    for start in range(first, last, _CHUNK):
        borders = np.asarray(dataset.document_indices[start : min(start + _CHUNK, last) + 1])
        is_usable = np.diff(borders) >= 2
        too_long = np.flatnonzero(dataset.sizes[borders[0] : borders[-1]] > LONGEST_SENTENCE) + borders[0]
        is_usable[np.searchsorted(borders, too_long, "right") - 1] = False
        yield borders[:-1][is_usable], borders[1:][is_usable]


def _pairs_of(dataset: IndexedDataset, starts: np.ndarray, ends: np.ndarray, lengths: TargetLengths) -> np.ndarray:
    """Rows as `write_pairs` writes them, int64 [samples, 3]."""
    if len(starts) == 0:
        return np.empty((0, 3), dtype=np.int64)
    base = int(starts[0])
    before = dataset.sequence_starts(np.arange(base, int(ends[-1]) + 1))  # tokens before each sentence
    found = []
    while len(starts):
        targets = lengths.of(starts)
        stops = base + np.searchsorted(before, before[starts - base] + targets)
        stops = np.maximum(stops, starts + 2)
        stops = np.where(stops <= ends - 2, stops, ends)  # a single sentence left over would have no pair
        found.append(np.stack([starts, stops, targets], axis=1))
        goes_on = stops < ends
        starts, ends = stops[goes_on], ends[goes_on]
    rows = np.concatenate(found)
    return rows[np.argsort(rows[:, 0])]


def _write_header(file: IO[bytes], dtype: np.dtype, count: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count, 3)})


def _uniform(key: int, numbers: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits: SplitMix64's output number `numbers` of the state `key`."""
    mixed = numbers * _STEP + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
