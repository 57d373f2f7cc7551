"""Binary token files: `.bin` holds the concatenated tokens, `.idx` the starts of sequences and documents.

Layout of `.idx`, little-endian: 9 bytes `MMIDIDX\\0\\0`, u64 version 1, u8 code of the token dtype, u64 number of
sequences n, u64 length of the document index, then int32 sizes[n] in tokens, int64 pointers[n] in bytes, and int64
document_indices[m + 1], from 0 to n. A sequence is a document for GPT and a sentence for BERT.

Source: the format of Megatron-LM's `data/indexed_dataset.py`, as written by its preprocess_data.py.
"""

import os
import struct
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

MAGIC, LAZY_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
VERSION = 1
# Megatron-core once swapped the meaning of 6 and 7; this is the current one. No tokens were ever floats.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
HEADER = struct.Struct("<9sQBQQ")
CHUNK = 1 << 22  # entries processed at once
# Indices that this process has validated, by path, sizes and modification time, with whether each document is one
# sequence. A run opens the same dataset several times, and validating a large index takes seconds.
_VALIDATED: dict[tuple, bool] = {}
_SETTLED_S = 2.0  # a more recently modified file may change again within one tick of the file system's clock


@dataclass(frozen=True)
class CorpusPart:
    """A range of documents of one indexed dataset.

    Args:
        prefix: path of the files without suffix.
        first, last: the part consists of the documents [first, last).
        identity: hash of the dataset, which seeds its shuffles and names its indices.
        weight: fraction of the samples, relative to the other parts.
    """

    prefix: str
    first: int
    last: int
    identity: str
    weight: float = 1.0


class IndexedDataset:
    """A memory-mapped dataset; picklable, so that loader processes map it themselves.

    Attributes, read-only, all but the first two memory-mapped:
        prefix, dtype
        sizes: int32 [n], tokens per sequence.
        pointers: int64 [n], byte at which each sequence begins.
        document_indices: int64 [m + 1], sequence at which each document begins, and n.
        tokens: dtype [all tokens].

    Raises:
        ValueError: a file is missing or violates the format; the message names the position.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        code, num_sequences, num_indices = self._read_header()
        self.dtype = np.dtype(DTYPES[code])
        index, start = f"{self.prefix}.idx", HEADER.size
        self.sizes = _mapped(index, "<i4", start, num_sequences)
        self.pointers = _mapped(index, "<i8", start + 4 * num_sequences, num_sequences)
        self.document_indices = _mapped(index, "<i8", start + 12 * num_sequences, num_indices)
        status = os.stat(index)
        key = os.path.abspath(self.prefix), status.st_size, status.st_mtime_ns, status.st_ino, self._num_bytes
        if key in _VALIDATED:
            self._is_sequence_a_document = _VALIDATED[key]
            return
        self._check_sequences()
        self._is_sequence_a_document = self._check_documents()
        if time.time() - status.st_mtime > _SETTLED_S:
            _VALIDATED[key] = self._is_sequence_a_document

    def __reduce__(self) -> tuple:
        return IndexedDataset, (self.prefix,)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        """Number of documents, m."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return self._num_bytes // self.dtype.itemsize

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, memory-mapped."""
        return _mapped(f"{self.prefix}.bin", self.dtype, 0, self.num_tokens)

    def sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return the token at which each of these sequences begins, int64 of that shape; sequence n is the end."""
        starts = np.full(sequences.shape, self.num_tokens, dtype=np.int64)
        inside = sequences < len(self.sizes)
        starts[inside] = self.pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def document_starts(self, documents: np.ndarray) -> np.ndarray:
        """Return the token at which each of these documents begins, int64 of that shape; document m is the end."""
        return self.sequence_starts(self.document_indices[documents])

    def document_sizes(self, first: int, last: int) -> np.ndarray:
        """Return the tokens per document of [first, last), integers; memory-mapped if each document is one sequence."""
        if self._is_sequence_a_document:
            return self.sizes[first:last]
        found = np.empty(last - first, dtype=np.int64)
        for start in range(first, last, CHUNK):
            end = min(start + CHUNK, last)
            found[start - first : end - first] = np.diff(self.document_starts(np.arange(start, end + 1)))
        return found

    def read_ranges(self, starts: np.ndarray, lengths: np.ndarray, vocab_size: int) -> np.ndarray:
        """Read and concatenate ranges of tokens; int64 [sum of the lengths].

        Shapes:
            starts, lengths: int64 [n]; lengths may be 0.

        Raises:
            ValueError: an id is outside the vocabulary; the message names its position in the file.
        """
        places = concatenate_ranges(starts, lengths)
        ids = self.tokens[places].astype(np.int64)
        if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
            wrong = int(np.argmax((ids >= vocab_size) | (ids < 0)))
            raise ValueError(
                f"{self.prefix}.bin: ids must be from 0 to {vocab_size - 1} (the tokenizer's), but token "
                f"{places[wrong]} is {ids[wrong]}"
            )
        return ids

    def _read_header(self) -> tuple[int, int, int]:
        """Return dtype code, number of sequences, and length of the document index."""
        path = f"{self.prefix}.idx"
        try:
            with open(path, "rb") as file:
                head = file.read(HEADER.size)
            length = os.path.getsize(path)
            self._num_bytes = os.path.getsize(f"{self.prefix}.bin")
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None
        if head.startswith(LAZY_MAGIC):
            raise ValueError(
                f"{path}: the format must be MMIDIDX, but is TNTIDX (Megatron-LM's old lazy or cached format); "
                "preprocess the text with --dataset-impl mmap"
            )
        if not head.startswith(MAGIC):
            raise ValueError(f"{path}: the first 9 bytes must be {MAGIC!r}, but are {head[:9]!r}")
        if len(head) < HEADER.size:
            raise ValueError(f"{path}: the header must have {HEADER.size} bytes, but the file has {len(head)}")
        _, version, code, num_sequences, num_indices = HEADER.unpack(head)
        if version != VERSION:
            raise ValueError(f"{path}: the version must be {VERSION}, but is {version}")
        if code not in DTYPES:
            raise ValueError(f"{path}: the code of the token type must be from 1 to 8, but is {code}")
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if length == expected + num_sequences > expected:
            raise ValueError(f"{path}: must be of a text dataset, but has a mode per sequence (multimodal)")
        if length != expected:
            wrong = "is truncated" if length < expected else "has bytes after its end"
            raise ValueError(
                f"{path}: {num_sequences} sequences and {num_indices} document indices must take {expected} bytes, but "
                f"it {wrong}: {length}"
            )
        return code, num_sequences, num_indices

    def _check_sequences(self) -> None:
        """Check that sizes are not negative, pointers are their running sum, and tokens fill the whole `.bin`."""
        end = 0
        for start in range(0, len(self.sizes), CHUNK):
            sizes = self.sizes[start : start + CHUNK]
            if sizes.min() < 0:
                place = start + int(np.argmax(sizes < 0))
                raise ValueError(f"{self.prefix}.idx: sizes must not be negative, but sequence {place} has one")
            ends = end + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
            expected = np.concatenate([[end], ends[:-1]])
            pointers = self.pointers[start : start + CHUNK]
            if not np.array_equal(pointers, expected):
                place = int(np.argmax(pointers != expected))
                raise ValueError(
                    f"{self.prefix}.idx: pointers must be the running sum of the sizes, but sequence {start + place} "
                    f"is at byte {pointers[place]} and not {expected[place]}"
                )
            end = int(ends[-1])
        if end != self._num_bytes:
            raise ValueError(f"{self.prefix}.bin must have the {end} bytes of its .idx, but has {self._num_bytes}")

    def _check_documents(self) -> bool:
        """Check that the document index ascends from 0 to n; returns whether each document is one sequence."""
        indices, count = self.document_indices, len(self.sizes)
        if len(indices) == 0 or indices[0] != 0 or indices[-1] != count:
            ends = "is empty" if len(indices) == 0 else f"goes from {indices[0]} to {indices[-1]}"
            raise ValueError(f"{self.prefix}.idx: the document index must go from 0 to {count}, but {ends}")
        is_one_each = True
        for start in range(0, len(indices) - 1, CHUNK):
            part = indices[start : start + CHUNK + 1]
            decreases = part[1:] < part[:-1]  # differences of forged entries may overflow
            if decreases.any():
                place = start + int(np.argmax(decreases))
                raise ValueError(
                    f"{self.prefix}.idx: the document index must not decrease, but does after entry {place}"
                )
            counts = np.diff(part)
            is_one_each &= bool(counts.min() == counts.max() == 1)
        return is_one_each


def concatenate_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges start, start + 1, ..., start + length - 1; int64 [sum of the lengths].

    Shapes:
        starts, lengths: int64 [n]; lengths may be 0.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + lengths, lengths) + np.arange(total)


def _mapped(path: str, dtype: np.dtype | str, offset: int, count: int) -> np.ndarray:
    """Map part of a file as a read-only array; an empty array cannot be mapped."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
