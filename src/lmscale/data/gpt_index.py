"""Which tokens make GPT's training samples: shuffled documents laid end to end, and shuffled windows over them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import IO

import numpy as np

from .permutation import Permutation

_CHUNK = 1 << 20  # documents worked on together
_ENOUGH = 0.8  # share of an epoch's samples from which the last epoch is shuffled with the others


@dataclass(frozen=True)
class GPTOrder:
    """The order of a run's documents and of the windows of s + 1 tokens over them.

    All epochs' documents are shuffled together and laid end to end, as are the windows cut from them, which overlap by
    one token. A last epoch of which the run needs less than 80 % is shuffled on its own, behind the others: its
    documents would else crowd out those of the whole epochs. Both shuffles are functions of the fields, so neither is
    stored; the number of samples asked counts only in so far as it decides the epochs and whether the last is apart.

    Args:
        identity: hash of the dataset.
        num_documents, num_tokens: of an epoch.
        seq_length: s.
        seed: of the run.
        num_samples: how many the run asks for.

    Source: Megatron-LM's `data/gpt2_dataset.py` and `separate_last_epoch` of its later `gpt_dataset.py`.
    """

    identity: str
    num_documents: int
    num_tokens: int
    seq_length: int
    seed: int
    num_samples: int = field(repr=False)

    @cached_property
    def num_epochs(self) -> int:
        """The fewest whose tokens make the samples asked for."""
        return max(1, -(-(self.num_samples * self.seq_length + 1) // self.num_tokens))

    @cached_property
    def num_windows(self) -> int:
        """Windows of all epochs; at least the samples asked for."""
        return (self.num_epochs * self.num_tokens - 1) // self.seq_length

    @cached_property
    def num_epochs_together(self) -> int:
        """All epochs, or all but a last one that is shuffled apart."""
        if self.num_epochs == 1:
            return 1
        wanted = self.num_samples - ((self.num_epochs - 1) * self.num_tokens - 1) // self.seq_length
        is_enough = wanted >= int(_ENOUGH * ((self.num_tokens - 1) // self.seq_length))
        return self.num_epochs if is_enough else self.num_epochs - 1

    @property
    def facts(self) -> tuple:
        """All that the order depends on."""
        fields = (self.identity, self.num_documents, self.num_tokens, self.seq_length, self.seed)
        return (*fields, self.num_epochs, self.num_epochs_together)

    def documents_at(self, positions: np.ndarray) -> np.ndarray:
        """The document, 0..num_documents-1, at each position of all epochs end to end; int64 as shaped."""
        return self._documents(positions) % self.num_documents

    def windows_at(self, samples: np.ndarray) -> np.ndarray:
        """The window that is sample number 0, 1, ... of the run; int64 as shaped."""
        return self._windows(samples)

    @cached_property
    def _documents(self) -> "_Shuffle":
        count, first_apart = (n * self.num_documents for n in (self.num_epochs, self.num_epochs_together))
        return _Shuffle(count, first_apart, f"gpt documents {self.facts}")

    @cached_property
    def _windows(self) -> "_Shuffle":
        first_apart = (self.num_epochs_together * self.num_tokens - 1) // self.seq_length
        return _Shuffle(self.num_windows, first_apart, f"gpt windows {self.facts}")


class _Shuffle:
    """A permutation of 0..count-1 that keeps those from `first_apart` on behind the others."""

    def __init__(self, count: int, first_apart: int, name: str) -> None:
        self.first_apart = first_apart
        self.together = Permutation(first_apart, name)
        self.apart = Permutation(count - first_apart, f"{name} last epoch") if count > first_apart else None

    def __call__(self, places: np.ndarray) -> np.ndarray:
        if self.apart is None:
            return self.together(places)
        found, is_apart = np.empty(places.shape, dtype=np.int64), places >= self.first_apart
        found[~is_apart] = self.together(places[~is_apart])
        found[is_apart] = self.first_apart + self.apart(places[is_apart] - self.first_apart)
        return found


def write_windows(file: IO[bytes], order: GPTOrder, sizes: np.ndarray) -> None:
    """Write where each window begins, in NumPy's format: rows (position in the document order, offset in tokens).

    There is one row more than windows, for the last token of the last. Memory does not grow with the epochs.

    Shapes:
        sizes: integers [num_documents], tokens of each document. Written: uint32 [num_windows + 1, 2], int64 where a
        position or a document does not fit.
    """
    num_positions = order.num_epochs * order.num_documents
    dtype = np.dtype("<u4" if max(num_positions, int(sizes.max())) < 2**32 else "<i8")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (order.num_windows + 1, 2)}
    np.lib.format.write_array_header_1_0(file, header)
    end, num_rows, s = 0, 0, order.seq_length
    for start in range(0, num_positions, _CHUNK):
        positions = np.arange(start, min(start + _CHUNK, num_positions))
        ends = end + np.cumsum(sizes[order.documents_at(positions)], dtype=np.int64)
        starts = np.concatenate([[end], ends[:-1]])
        end = int(ends[-1])
        held = np.diff(-(-np.concatenate([starts[:1], ends]) // s))  # multiples of s in each document
        which = np.repeat(np.arange(len(positions)), held)
        rows = np.empty((len(which), 2), dtype=dtype)
        rows[:, 0] = start + which
        rows[:, 1] = np.arange(num_rows, num_rows + len(which)) * s - starts[which]
        num_rows += len(which)
        file.write(rows.data)
    assert end == order.num_epochs * order.num_tokens and num_rows == order.num_windows + 1
