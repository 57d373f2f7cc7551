"""Index of GPT's training samples: shuffled documents are concatenated, and windows over them are shuffled."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import IO

import numpy as np

from .permutation import Permutation

_CHUNK = 1 << 20  # documents processed at once
_ENOUGH = 0.8  # fraction of an epoch's samples from which the last epoch is shuffled with the others


@dataclass(frozen=True)
class GPTOrder:
    """The order of a run's documents and of the windows of s + 1 tokens over them.

    The documents of all epochs are shuffled together and concatenated. Windows over them overlap by one token and are
    shuffled as well. If the run needs less than 80 % of the last epoch, that epoch is shuffled separately and comes
    last; otherwise its documents would displace those of the complete epochs. Both shuffles are functions of the
    fields, so neither is stored. The number of samples matters only through the number of epochs and whether the last
    one is separate.

    Args:
        identity: hash of the dataset.
        num_documents, num_tokens: per epoch.
        seq_length: s.
        seed: of the run.
        num_samples: number of samples the run needs.

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
        """Smallest number of epochs with enough tokens for the samples."""
        return max(1, -(-(self.num_samples * self.seq_length + 1) // self.num_tokens))

    @cached_property
    def num_windows(self) -> int:
        """Number of windows over all epochs, at least `num_samples`."""
        return (self.num_epochs * self.num_tokens - 1) // self.seq_length

    @cached_property
    def num_epochs_together(self) -> int:
        """All epochs, or all but the last one if that is shuffled separately."""
        if self.num_epochs == 1:
            return 1
        wanted = self.num_samples - ((self.num_epochs - 1) * self.num_tokens - 1) // self.seq_length
        is_enough = wanted >= int(_ENOUGH * ((self.num_tokens - 1) // self.seq_length))
        return self.num_epochs if is_enough else self.num_epochs - 1

    @property
    def facts(self) -> tuple:
        """Everything the order depends on."""
        fields = (self.identity, self.num_documents, self.num_tokens, self.seq_length, self.seed)
        return (*fields, self.num_epochs, self.num_epochs_together)

    def documents_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the document, 0..num_documents-1, at each position of the concatenated epochs; int64 of that shape."""
        return self._documents(positions) % self.num_documents

    @cached_property
    def _documents(self) -> "_Shuffle":
        count, first_apart = (n * self.num_documents for n in (self.num_epochs, self.num_epochs_together))
        return _Shuffle(count, first_apart, f"gpt documents {self.facts}")

    @cached_property
    def windows_at(self) -> "_Shuffle":
        """The function from samples of the run to their windows, both int64."""
        first_apart = (self.num_epochs_together * self.num_tokens - 1) // self.seq_length
        return _Shuffle(self.num_windows, first_apart, f"gpt windows {self.facts}")


class _Shuffle:
    """A permutation of 0..count-1 that permutes the entries from `first_apart` on separately."""

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
    """Write the start of each window in NumPy's format: rows (position in the document order, offset in tokens).

    There is one row more than windows, for the last token of the last window. Memory does not grow with the epochs.

    Shapes:
        sizes: integers [num_documents], tokens of each document. Written: uint32 [num_windows + 1, 2], or int64 if a
        position or an offset does not fit.
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
