import numpy as np
import torch

from lmscale.hashing import SIGNED_GOLDEN, mix_signed, splitmix64

# The first outputs with seed 1234567, as published with the generator.
OUTPUTS = [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_splitmix64_has_the_published_outputs() -> None:
    assert splitmix64(1234567, np.arange(1, 4, dtype=np.uint64)).tolist() == OUTPUTS


def test_signed_numbers_are_mixed_as_unsigned_ones() -> None:
    outputs = mix_signed(torch.arange(1, 4) * SIGNED_GOLDEN + 1234567)
    assert [output % 2**64 for output in outputs.tolist()] == OUTPUTS
