"""Encoded inputs of one set: concatenated token ids in a few arrays, stored in a folder."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Features:
    """Model inputs of one set.

    An *item* is the unit of training and scoring: a pair, a RACE question with its `num_choices` sequences, or a window
    of SQuAD. An *example* is a row of the data.

    Shapes:
        n items, c choices per item, t tokens of all sequences. tokens int32 [t]; starts int64 [n c + 1], first token of
        each sequence; second_starts int32 [n c], tokens of a sequence before its second text; labels int64 [n], or
        [n, 2] with first and last position of the answer, -1 if unknown; of numbers fp64 [n], nan if unknown. SQuAD:
        offsets int32 [t, 2], first and last character (excluded) of each context token, -1 for other tokens;
        window_examples int32 [n], index of the example; window_starts int32 [n], index in the context of the window's
        first token.

    Args:
        ids: of the examples.
        facts: further data for scoring: `groups`, or SQuAD's `dataset` in the official form.
        notes: one line per reason for skipping rows.
    """

    tokens: np.ndarray
    starts: np.ndarray
    second_starts: np.ndarray
    labels: np.ndarray
    ids: list[str]
    num_choices: int = 1
    offsets: np.ndarray | None = None
    window_examples: np.ndarray | None = None
    window_starts: np.ndarray | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_labelled(self) -> bool:
        """Whether every item has a label."""
        is_number = self.labels.dtype.kind == "f"
        return bool((~np.isnan(self.labels) if is_number else self.labels >= 0).all())

    def lengths(self) -> np.ndarray:
        """Return the tokens of each item's longest sequence, int64 [n]."""
        return np.diff(self.starts).reshape(len(self), self.num_choices).max(axis=1)

    def first(self, count: int | None) -> "Features":
        """Return the first `count` items, or all if it is None; for training only."""
        if count is None or count >= len(self):
            return self
        sequences = count * self.num_choices
        return replace(
            self,
            starts=self.starts[: sequences + 1],
            second_starts=self.second_starts[:sequences],
            labels=self.labels[:count],
            ids=self.ids[: count if self.window_examples is None else self.window_examples[count - 1] + 1],
        )


_ARRAYS = ("tokens", "starts", "second_starts", "labels", "offsets", "window_examples", "window_starts")
_VALUES = ("ids", "num_choices", "facts", "notes")


def load_features(folder: Path) -> Features:
    """Load what `save_features` has written; arrays are memory-mapped."""
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS if (folder / f"{name}.npy").is_file()
    }
    values = json.loads((folder / "features.json").read_text(encoding="utf-8"))
    return Features(**arrays, **values)


def save_features(features: Features, folder: Path) -> None:
    """Write the arrays and values to an existing folder."""
    for name in _ARRAYS:
        if getattr(features, name) is not None:
            np.save(folder / f"{name}.npy", getattr(features, name))
    values = {name: getattr(features, name) for name in _VALUES}
    (folder / "features.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
