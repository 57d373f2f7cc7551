"""Many stretches of a token file at once."""

import numpy as np

from .indexed_dataset import IndexedDataset


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers start, start + 1, ... of every stretch, one after the other; int64 [sum of the lengths].

    Shapes:
        starts, lengths: int64 [n]; lengths may be 0.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + lengths, lengths) + np.arange(total)


def read_stretches(dataset: IndexedDataset, starts: np.ndarray, lengths: np.ndarray, vocab_size: int) -> np.ndarray:
    """The tokens of many stretches, one after the other; int64 [sum of the lengths].

    Raises:
        ValueError: an id that is not of the vocabulary, with its place in the file.
    """
    places = ranges(starts, lengths)
    ids = dataset.tokens[places].astype(np.int64)
    if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
        wrong = int(np.argmax((ids >= vocab_size) | (ids < 0)))
        raise ValueError(
            f"{dataset.prefix}.bin: ids must be from 0 to {vocab_size - 1} (the tokenizer's), but token "
            f"{places[wrong]} is {ids[wrong]}"
        )
    return ids
