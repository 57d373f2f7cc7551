"""Shuffles without stored tables: each entry of the permutation is computed when needed."""

import hashlib

import numpy as np

from ..hashing import GOLDEN

TABLE_SIZE = 1 << 20  # largest stored shuffle: uniform over all permutations, at most 8 MB
_CHUNK = 1 << 15  # positions computed at once, to stay in the processor's cache
_ROUNDS = 6
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation:
    """A permutation of 0..size-1 seeded by a name, the same in every process.

    Small permutations use NumPy's shuffle. Large ones use a Feistel network over the smallest power of two of at least
    `size`, applied again to values outside the range (cycle walking); this is a bijection for any round function. It
    needs at most two evaluations per position on average and no memory; a stored order of 10^8 samples would take
    0.8 GB per rank.

    Args:
        size: at least 1.
        name: seed; different names give different permutations.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002); the round function is ours.
    """

    def __init__(self, size: int, name: str) -> None:
        assert size >= 1
        self.size = size
        self.table: np.ndarray | None = None
        if size <= TABLE_SIZE:
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
            self.table = generator.permutation(size)
            return
        digest = hashlib.blake2b(name.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")
        bits = (size - 1).bit_length()
        self._right_bits = np.uint64(bits // 2)
        self._right_mask = np.uint64((1 << bits // 2) - 1)
        self._left_mask = np.uint64((1 << bits - bits // 2) - 1)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the entries at these positions 0..size-1 of the shuffled order, int64 of that shape."""
        if self.table is not None:
            return self.table[places]
        found = np.empty(places.shape, dtype=np.int64)
        flat, out = places.reshape(-1), found.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            out[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK].astype(np.uint64))
        return found

    def _walk(self, values: np.ndarray) -> np.ndarray:
        values = self._encrypt(values)
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            moved = self._encrypt(values[outside])
            values[outside] = moved
            outside = outside[moved >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._right_bits, values & self._right_mask
        for number in range(0, _ROUNDS, 2):
            left ^= _mixed(right, self._keys[number]) & self._left_mask
            right ^= _mixed(left, self._keys[number + 1]) & self._right_mask
        return (left << self._right_bits) | right


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the upper halves after two rounds of multiplication, uint64 below 2^32."""
    mixed = values + key
    mixed *= GOLDEN
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed >>= _HALF
    return mixed
