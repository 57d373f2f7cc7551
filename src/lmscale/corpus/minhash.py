"""MinHash signatures of shingle sets, as one hash for each band of a locality-sensitive search."""

import numpy as np

from .shingles import mix, polynomial

BLOCK_VALUES = 2**14  # shingles hashed at once, with the rows of a band: stays in the cache of a core
_STEP = 0x9E3779B97F4A7C15  # of SplitMix64: the odd number nearest to 2**64 over the golden ratio


def band_hashes(
    values: np.ndarray, offsets: np.ndarray, bands: int = 25, rows: int = 5, seed: int = 1234
) -> np.ndarray:
    """Hashes of each band of each document's MinHash signature; two documents are candidates where one is equal.

    Row k of a signature is the smallest of `a_k x mod 2**32` over the shingles x of the document (the upper half of
    their hashes), with a_k odd and random: x is random already, so that a multiplication, which only permutes the
    32-bit numbers, makes each shingle the smallest with equal probability. Two sets then agree in a row with the
    probability of their Jaccard similarity.

    Args:
        values: uint64 [total], hashes of the shingles of all documents.
        offsets: int64 [documents + 1], where each document begins in `values`.
        bands: of the signature.
        rows: hash functions of a band.
        seed: of the hash functions; the same for all documents to be compared.

    Returns:
        uint64 [documents, bands], with each band contiguous. Documents without shingles all have equal hashes.

    Raises:
        ValueError: `bands` or `rows` is less than 1.

    Source: Broder, "On the resemblance and containment of documents", 1997; bands as in Leskovec, Rajaraman and
    Ullman, "Mining of massive datasets", section 3.4.
    """
    for name, number in (("bands", bands), ("rows", rows)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {number}")
    multipliers = _multipliers(bands * rows, seed).reshape(bands, rows)
    signature = np.full((bands, rows, len(offsets) - 1), 2**32 - 1, dtype=np.uint32)
    filled = np.flatnonzero(np.diff(offsets) > 0)  # `reduceat` has no notion of an empty document
    begins = offsets[filled]
    for start in range(0, len(values), BLOCK_VALUES):
        block = (values[start : start + BLOCK_VALUES] >> np.uint64(32)).astype(np.uint32)
        first = int(np.searchsorted(begins, start, side="right")) - 1
        last = int(np.searchsorted(begins, start + len(block)))
        borders = np.maximum(begins[first:last] - start, 0)  # the first document may have begun in an earlier block
        documents = filled[first:last]
        products = np.empty((rows, len(block)), dtype=np.uint32)
        for band in range(bands):
            np.multiply(multipliers[band][:, None], block, out=products)
            smallest = np.minimum.reduceat(products, borders, axis=1)
            smallest[:, 0] = np.minimum(smallest[:, 0], signature[band, :, documents[0]])
            signature[band][:, documents] = smallest
    hashes = np.empty((bands, len(offsets) - 1), dtype=np.uint64)
    for band in range(bands):
        hashes[band] = polynomial(list(signature[band].astype(np.uint64)))
    return hashes.T


def candidate_probability(jaccard: float, bands: int, rows: int) -> float:
    """Probability that two documents agree in all rows of at least one band: 1 - (1 - s**rows)**bands.

    Args:
        jaccard: similarity s of their shingle sets, 0 to 1.
        bands: of the signature.
        rows: hash functions of a band.

    Source: Leskovec, Rajaraman and Ullman, "Mining of massive datasets", section 3.4.
    """
    return 1 - (1 - jaccard**rows) ** bands


def _multipliers(number: int, seed: int) -> np.ndarray:
    """Odd uint32 [number], the first outputs of SplitMix64: a generator whose stream no library can change."""
    counters = [(seed + (k + 1) * _STEP) % 2**64 for k in range(number)]
    mixed = mix(np.array(counters, dtype=np.uint64))
    return (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
