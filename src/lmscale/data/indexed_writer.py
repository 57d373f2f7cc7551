"""Write binary token files by document or by shard; `indexed_dataset` describes the format."""

import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from .indexed_dataset import CHUNK, DTYPES, HEADER, MAGIC, VERSION, IndexedDataset

_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_SMALL_VOCAB = 65_500


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype Megatron-LM uses for ids of a vocabulary: uint16 below 65,500 ids, otherwise int32."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCAB else "<i4")


class IndexedWriter(AbstractContextManager):
    """Write a dataset document by document; files with the final names are always complete. A context manager.

    Memory holds 4 bytes per sequence and 8 per document. Both files are written under temporary names; `finish` renames
    `.bin`, then `.idx`. A `.bin` without its `.idx` is not a dataset.

    Args:
        prefix: path of the files without suffix; `finish` replaces existing files.
        dtype: of the tokens, one of the format's.

    Raises:
        ValueError: the folder cannot be written, or (from every method) the disk is full.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type | str) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype).newbyteorder("<")
        self.sizes, self.document_indices = array("i"), array("q", [0])
        self._bin, self._idx = (f"{self.prefix}.{kind}.unfinished_{os.getpid()}" for kind in ("bin", "idx"))
        with self._writing():
            self._file = open(self._bin, "wb", buffering=1 << 20)

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def add_documents(self, ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> None:
        """Append documents; a sequence may be empty.

        Args:
            ids: integers [tokens], of all concatenated sequences.
            sizes: integers [sequences], tokens per sequence.
            counts: integers [documents], sequences per document.
        """
        assert sizes.sum() == len(ids) and counts.sum() == len(sizes)
        if ids.size:
            tokens = ids.astype(self.dtype, copy=False)
            assert np.array_equal(tokens, ids), "the vocabulary decides the dtype"
            with self._writing():
                self._file.write(tokens.tobytes())
        self.document_indices.frombytes((len(self.sizes) + np.cumsum(counts, dtype=np.int64)).tobytes())
        self.sizes.frombytes(sizes.astype(np.int32).tobytes())

    def append(self, other: "IndexedDataset") -> None:
        """Append all documents of another dataset of the same dtype by copying its files' bytes."""
        assert other.dtype == self.dtype
        with self._writing(), open(f"{other.prefix}.bin", "rb") as file:
            shutil.copyfileobj(file, self._file, 1 << 24)
        first = len(self.sizes)
        self.sizes.frombytes(other.sizes.tobytes())
        self.document_indices.frombytes((other.document_indices[1:] + first).tobytes())

    def finish(self) -> None:
        """Write the index and rename both files to their final names."""
        sizes = np.frombuffer(self.sizes, dtype=np.int32)
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            with open(self._idx, "wb") as file:
                head = _CODES[self.dtype], len(sizes), len(self.document_indices)
                file.write(HEADER.pack(MAGIC, VERSION, *head))
                file.write(sizes.astype("<i4", copy=False).data)
                end = 0
                for start in range(0, len(sizes), CHUNK):
                    ends = end + np.cumsum(sizes[start : start + CHUNK], dtype=np.int64) * self.dtype.itemsize
                    file.write(np.concatenate([[end], ends[:-1]]).astype("<i8").data)
                    end = int(ends[-1])
                file.write(np.frombuffer(self.document_indices, dtype=np.int64).astype("<i8", copy=False).data)
                file.flush()
                os.fsync(file.fileno())
            # An index of an earlier dataset must never be combined with the new tokens.
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            os.replace(self._bin, f"{self.prefix}.bin")
            os.replace(self._idx, f"{self.prefix}.idx")

    def discard(self) -> None:
        """Remove the unfinished files."""
        with suppress(OSError, AttributeError):  # flushing the last buffer fails on a full disk; there may be no file
            self._file.close()
        for path in (self._bin, self._idx):
            Path(path).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()
            raise ValueError(f"{self.prefix}.bin and .idx cannot be written: {error.strerror}") from None


def merge(prefixes: Sequence[str | Path], out: str | Path) -> None:
    """Concatenate one or more datasets of one dtype.

    Raises:
        ValueError: one is damaged, or the disk is full.
    """
    with IndexedWriter(out, IndexedDataset(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            writer.append(IndexedDataset(prefix))
