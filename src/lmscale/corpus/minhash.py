"""MinHash signatures of shingle sets, reduced to one hash per band for locality-sensitive hashing."""

import numpy as np

from ..hashing import splitmix64
from .shingles import polynomial

BLOCK_VALUES = 2**14  # shingles hashed at once: they fit a core's cache together with the rows of a band
_SEED = 1234  # of the hash functions: hashes can be compared only if they share it


def band_hashes(values: np.ndarray, offsets: np.ndarray, bands: int = 25, rows: int = 5) -> np.ndarray:
    """Hash each band of each document's MinHash signature; documents that share a band hash are candidates.

    Row k of a signature is the minimum of `a_k x mod 2**32` over the document's shingles x (the upper half of their
    hashes), with a_k odd and random. Multiplication by a_k permutes the 32-bit numbers and x is already random, so
    each shingle is the minimum with equal probability, and two sets agree in a row with a probability equal to their
    Jaccard similarity.

    Args:
        values: uint64 [total], hashes of the shingles of all documents.
        offsets: int64 [documents + 1], index in `values` at which each document begins.
        bands: number of bands of the signature.
        rows: number of hash functions per band.

    Returns:
        uint64 [documents, bands], each band contiguous. All documents without shingles have equal hashes.

    Source: Broder, "On the resemblance and containment of documents", 1997; bands as in Leskovec, Rajaraman and
    Ullman, "Mining of massive datasets", section 3.4.
    """
    multipliers = _multipliers(bands * rows).reshape(bands, rows)
    signature = np.full((bands, rows, len(offsets) - 1), 2**32 - 1, dtype=np.uint32)
    nonempty = np.flatnonzero(np.diff(offsets) > 0)  # `reduceat` cannot represent an empty document
    begins = offsets[nonempty]
    for start in range(0, len(values), BLOCK_VALUES):
        block = (values[start : start + BLOCK_VALUES] >> np.uint64(32)).astype(np.uint32)
        first = int(np.searchsorted(begins, start, side="right")) - 1
        last = int(np.searchsorted(begins, start + len(block)))
        bounds = np.maximum(begins[first:last] - start, 0)  # the first document may have begun in an earlier block
        documents = nonempty[first:last]
        products = np.empty((rows, len(block)), dtype=np.uint32)
        for band in range(bands):
            np.multiply(multipliers[band][:, None], block, out=products)
            smallest = np.minimum.reduceat(products, bounds, axis=1)
            smallest[:, 0] = np.minimum(smallest[:, 0], signature[band, :, documents[0]])
            signature[band][:, documents] = smallest
    hashes = np.empty((bands, len(offsets) - 1), dtype=np.uint64)
    for band in range(bands):
        hashes[band] = polynomial(list(signature[band].astype(np.uint64)))
    return hashes.T


def _multipliers(number: int) -> np.ndarray:
    """Return odd uint32 [number], the first outputs of SplitMix64, which do not depend on a library's version."""
    outputs = splitmix64(_SEED, np.arange(1, number + 1, dtype=np.uint64))
    return (outputs >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
