"""Baselines without a network: interpolated Kneser-Ney n-grams, and for BERT the scored position alone."""

import numpy as np


def kneser_ney_losses(train: np.ndarray, ids: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    """Negative log probability of each id given the ids before it, in nats, by a model of `order` ids.

    Counts of the highest order are discounted by one constant per order, n1 / (n1 + 2 n2), and interpolated with the
    lower order, which counts distinct left neighbours instead of occurrences. The lowest order is interpolated with the
    uniform distribution, so every id has a finite loss. The first ids of the text have a shorter context.

    Args:
        vocab_size: ids are below it; at most 2^(63 / order).

    Shapes:
        train, ids integers [any length]; returns float64 [len(ids)].

    Source: Chen and Goodman 1999, section 4.1.5 and equation 26 for the discount.
    """
    probability = np.full(len(ids), 1 / vocab_size)
    for length in range(1, order + 1):
        grams = _keys(train, vocab_size, length)
        if length < order:
            grams = np.unique(_keys(train, vocab_size, length + 1)) % vocab_size**length
        grams, counts = np.unique(grams, return_counts=True)
        contexts, place = np.unique(grams // vocab_size, return_inverse=True)
        totals, kinds = np.bincount(place, counts), np.bincount(place)
        once, twice = np.sum(counts == 1), np.sum(counts == 2)
        discount = once / (once + 2 * twice) if once else 0.5  # above 0: the rest is what unseen ids share
        asked = _keys(ids, vocab_size, length)
        count, before = _find(grams, counts, asked), asked // vocab_size
        total, kind = _find(contexts, totals, before), _find(contexts, kinds, before)
        lower = probability[length - 1 :]
        found = np.maximum(count - discount, 0) + discount * kind * lower
        probability[length - 1 :] = np.where(total > 0, found / np.maximum(total, 1), lower)
    return -np.log(probability)


def context_free_losses(
    train: np.ndarray, inputs: np.ndarray, scored: np.ndarray, mask: int, vocab_size: int
) -> np.ndarray:
    """Negative log probability of BERT's scored ids given only the input at their own position, in nats.

    Of the scored positions 80 % show [MASK], 10 % the scored id itself and 10 % a uniformly drawn one. So an input x
    other than [MASK] is the scored id with probability p(x) / (p(x) + 1 / vocab_size), p being the frequencies of
    `train`, with one added to each count.

    Args:
        inputs, scored: what the model is given and what it must predict at the scored positions.
        mask: id of [MASK].

    Shapes:
        train integers [any length]; inputs, scored integers [n]; returns float64 [n].
    """
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    frequency = counts / counts.sum()
    shown = (frequency[scored] / vocab_size + (inputs == scored) * frequency[scored]) / (
        1 / vocab_size + frequency[inputs]
    )
    return -np.log(np.where(inputs == mask, frequency[scored], shown))


def _keys(ids: np.ndarray, vocab_size: int, length: int) -> np.ndarray:
    """Each window of `length` ids as one integer; its last id is the remainder modulo `vocab_size`."""
    keys = np.zeros(max(len(ids) - length + 1, 0), dtype=np.int64)
    for first in range(length):
        keys = keys * vocab_size + ids[first : first + len(keys)]
    return keys


def _find(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The value of each asked key, 0 if it is absent; `keys` are sorted."""
    places = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[places] == asked, values[places], 0)
