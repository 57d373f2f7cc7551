"""Index of BERT's training samples: the sentences of each, drawn once from the seed and vectorized over documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np

from ..hashing import splitmix64
from .indexed_dataset import IndexedDataset

LONGEST_SENTENCE = 512  # tokens; documents with a longer one are skipped, as in Megatron-LM
_CHUNK = 1 << 16  # documents processed at once


@dataclass(frozen=True)
class TargetLengths:
    """Target number of tokens of a sample, a pure function of the seed and the sample's first sentence.

    Args:
        key: 64-bit hash of the run's seed.
        longest: tokens of a full sample, at least 2.
        short_probability: probability that the length is drawn uniformly from 2..longest instead.
    """

    key: int
    longest: int
    short_probability: float

    def of(self, sentences: np.ndarray) -> np.ndarray:
        """Return the target lengths of the samples that begin with these sentences, int64 of that shape."""
        numbers = sentences.astype(np.uint64) * np.uint64(2)
        is_short = _uniform(self.key, numbers) < self.short_probability
        drawn = 2 + (_uniform(self.key, numbers + np.uint64(1)) * (self.longest - 1)).astype(np.int64)
        return np.where(is_short, drawn, self.longest)


def write_pairs(file: IO[bytes], dataset: IndexedDataset, first: int, last: int, lengths: TargetLengths) -> None:
    """Write the samples of the documents [first, last) in NumPy's format, in the order of their sentences.

    A sample takes sentences of one document until it reaches the target length; the document's last two or more form a
    sample of any length. Documents of one sentence, or with a sentence of more than `LONGEST_SENTENCE` tokens, are
    skipped.

    All documents of a chunk advance together: a binary search in the running sum of the sentences' sizes finds the end
    of each document's next sample, so the number of passes is the largest number of samples per document.

    Shapes:
        written: rows (first sentence, sentence after the last, target length), uint32 [samples, 3], or int64 for more
        than 2^32 sentences.

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
    _write_header(file, dtype, count)  # same length as before: NumPy pads the header so that the row count can grow
    assert file.tell() == begin


def usable_documents(dataset: IndexedDataset, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the documents of [first, last) that have two sentences or more and none too long, one chunk at a time.

    Yields:
        first sentence of each document and the one after its last, int64 [usable documents of the chunk].
    """
    for start in range(first, last, _CHUNK):
        bounds = np.asarray(dataset.document_indices[start : min(start + _CHUNK, last) + 1])
        is_usable = np.diff(bounds) >= 2
        too_long = np.flatnonzero(dataset.sizes[bounds[0] : bounds[-1]] > LONGEST_SENTENCE) + bounds[0]
        is_usable[np.searchsorted(bounds, too_long, "right") - 1] = False
        yield bounds[:-1][is_usable], bounds[1:][is_usable]


def _pairs_of(dataset: IndexedDataset, starts: np.ndarray, ends: np.ndarray, lengths: TargetLengths) -> np.ndarray:
    """Return the rows of `write_pairs`, int64 [samples, 3]."""
    if len(starts) == 0:
        return np.empty((0, 3), dtype=np.int64)
    base = int(starts[0])
    before = dataset.sequence_starts(np.arange(base, int(ends[-1]) + 1))  # tokens before each sentence
    found = []
    while len(starts):
        targets = lengths.of(starts)
        stops = base + np.searchsorted(before, before[starts - base] + targets)
        stops = np.maximum(stops, starts + 2)
        stops = np.where(stops <= ends - 2, stops, ends)  # a single remaining sentence would have no partner
        found.append(np.stack([starts, stops, targets], axis=1))
        is_unfinished = stops < ends
        starts, ends = stops[is_unfinished], ends[is_unfinished]
    rows = np.concatenate(found)
    return rows[np.argsort(rows[:, 0])]


def _write_header(file: IO[bytes], dtype: np.dtype, count: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count, 3)})


def _uniform(key: int, numbers: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) with 53 random bits: outputs number `numbers` of SplitMix64 with state `key`."""
    return (splitmix64(key, numbers) >> np.uint64(11)) * 2.0**-53
