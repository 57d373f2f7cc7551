"""SplitMix64, of unsigned numbers in NumPy and of signed ones in torch, with equal bits.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from typing import Any

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15  # increment of the state: the odd number nearest to 2**64 / golden ratio
GOLDEN, SIGNED_GOLDEN = np.uint64(_GOLDEN), _GOLDEN - 2**64  # torch has no products of uint64
_MIXERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(state: int, numbers: np.ndarray) -> np.ndarray:
    """Return the outputs of these numbers (uint64, counted from 1) of the generator with this 64-bit state."""
    return mix(numbers * GOLDEN + np.uint64(state))


def mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of `values` (uint64, modified in place) so that each affects all 64; a bijection."""
    shifted = np.empty_like(values)
    for shift, multiplier in zip((30, 27), _MIXERS, strict=True):
        np.bitwise_xor(values, np.right_shift(values, np.uint64(shift), out=shifted), out=values)
        np.multiply(values, np.uint64(multiplier), out=values)
    return np.bitwise_xor(values, np.right_shift(values, np.uint64(31), out=shifted), out=values)


def mix_signed(x: Any) -> Any:
    """Mix the bits of an int64 tensor as `mix` does; torch's >> keeps the sign, hence the masks."""
    for shift, multiplier in zip((30, 27), _MIXERS, strict=True):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * (multiplier - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))
