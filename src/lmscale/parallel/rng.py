"""Randomness by counter, for dropout and initial weights, and the two kinds of dropout (appendix B.2).

Outside the parallel region (embeddings, sublayer outputs) every tensor rank must drop the same elements. The mask is a
hash of (seed, sample, site, position): it needs no state, and no layout, micro-batch size or restart changes it.
Inside the region (attention probabilities) the ranks hold different heads and must draw different numbers. They use
torch's default generator, seeded for each micro-batch by (seed, step, micro-step, data rank, tensor rank, stage).

| site | region | mask |
|---|---|---|
| embedding sum; output of attention; output of MLP | outside | counter, equal on all tensor ranks |
| attention probabilities, `attention=sdpa` | inside | the rank's generator |
| attention probabilities, `attention=exact` | inside | counter; row = (head's index in the whole model) x S + query |

S is the length of the sequences, which is constant in pretraining. In finetuning a micro-batch is as long as its
longest item, so S is the model's number of positions.
"""

import hashlib
import math
from functools import cache

import torch
from torch import Tensor

# Odd 32-bit multipliers as in Weyl sequences and MurmurHash, signed because torch has no full uint32 arithmetic.
_MIX_1 = 0x85EBCA6B - 2**32
_MIX_2 = 0xC2B2AE35 - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
_COLUMN = 0x27D4EB2F
_SITE = 0x632BE5AB


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int32 `x` (MurmurHash3's finalizer), so that every bit of the result depends on all of them."""
    x = x ^ ((x >> 16) & 0xFFFF)  # torch's >> keeps the sign, hence the masks
    x = x * _MIX_1
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def _wrapped(number: int) -> int:
    """A number modulo 2^32 as a signed one, to be added to int32 tensors."""
    return (number + 2**31) % 2**32 - 2**31


def _codes(indices: Tensor, factor: int) -> Tensor:
    """Each of the indices, int32 and not negative, times a factor.

    The mask changes no number. It keeps Inductor from multiplying the factor itself: by the step of a vector register,
    whose overflow is undefined in C++ (compiled fp64 gradients had masks other than the forward pass's), or by the rows
    of a block, a constant beyond the int32 that Triton accepts.
    """
    return (indices & 0x7FFFFFFF) * factor


def sample_dropout_keys(seed: int, sample_numbers: Tensor) -> Tensor:
    """One key per sample, from the run's seed and the sample's number in the run, which is the same at every layout.

    Shapes:
        sample_numbers int64 [b], counted over the whole run, so that the step is part of it; returns int32 [b].
    """
    low = (sample_numbers & 0x7FFFFFFF).to(torch.int32)
    high = (sample_numbers >> 31).to(torch.int32)
    digest = hashlib.blake2b(f"dropout/{seed}".encode(), digest_size=4).digest()
    start = int.from_bytes(digest, "little", signed=True)
    return _mix(_mix(low + start) + high * _GOLDEN)


def site_keys(sample_keys: Tensor, num_sites: int) -> Tensor:
    """The keys of all dropouts of a model (sites); different sites have independent masks.

    The keys are tensors, not numbers stored in the modules, so that one compiled graph serves all layers.

    Shapes:
        sample_keys int32 [b]; returns int32 [num_sites, b].
    """
    sites = torch.arange(1, num_sites + 1, device=sample_keys.device) * _SITE % 2**31
    return _mix(sample_keys + sites.to(torch.int32).unsqueeze(-1))


def counter_keep_mask(keys: Tensor, num_rows: int, num_columns: int, probability: float) -> Tensor:
    """Which elements dropout keeps, decided by a hash of (key of sample and site, row, column).

    Shapes:
        keys int32 [b], a row of `site_keys`, or from a later row on `keys_from_row`; returns bool
        [b, num_rows, num_columns], True where kept.

    Args:
        probability: fraction that is dropped, to within 2^-32.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=keys.device)
    columns = torch.arange(num_columns, dtype=torch.int32, device=keys.device)
    return counter_bits(keys, rows, columns) >= int(probability * 2**32) - 2**31


def counter_bits(keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Random bits: a hash of (key, row, column).

    Shapes:
        keys int32 [k]; rows int32 [r] and columns int32 [c] or, other ones per key, [k, 1, c]: indices; returns int32
        [k, r, c].
    """
    row_keys = _mix(keys.unsqueeze(-1) + _codes(rows, _GOLDEN))  # [k, r]
    return _mix(row_keys.unsqueeze(-1) ^ _codes(columns, _COLUMN))


def keys_from_row(keys: Tensor, first_row: Tensor) -> Tensor:
    """Keys that give the masks of `keys` from a row on: their row 0 is row `first_row` of `keys`.

    Shapes:
        keys int32 [..., 1]; first_row int32 [r], not negative; returns int32 [..., r].
    """
    return keys + _codes(first_row, _GOLDEN)


def counter_dropout(x: Tensor, probability: float, keys: Tensor) -> Tensor:
    """Dropout outside the parallel region: the same elements on every tensor rank and at every layout.

    Shapes:
        x [b, s, h]; keys int32 [b], a row of `site_keys` or, with sequence parallelism, of `keys_of_own_tokens`;
        returns [b, s, h], scaled by 1 / (1 - probability).

    Source: appendix B.2, with a counter in place of the paper's shared generator state: stateless masks survive
    activation checkpointing, restarts and changes of layout.
    """
    keep = counter_keep_mask(keys, x.shape[1], x.shape[2], probability)
    return torch.where(keep, x * (1.0 / (1.0 - probability)), 0.0)


def normal_keys(seed: int, name: str) -> Tensor:
    """The two keys of a parameter's initial weights.

    Shapes:
        returns int32 [2], on the CPU.
    """
    digest = hashlib.blake2b(f"weights/{seed}/{name}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:])]).int()


def counter_normal(
    keys: Tensor, num_rows: int, num_columns: int, first_row: int, first_column: int, quantiles: Tensor
) -> Tensor:
    """Numbers from N(0, 1), each decided by a hash of (keys, row, column): the same bits on every device.

    Each is the sum of two `normal_quantiles` chosen by the two halves of the hash. Integer operations, two reads and an
    exact sum leave nothing to round, where a device's logarithm and cosine (Box-Muller) would differ in the last bits.
    Two keys per parameter, since among millions of rows some would have equal 32-bit keys, and then equal weights.

    Shapes:
        keys int32 [2]; quantiles fp32 [65536], on the same device; returns fp32 [num_rows, num_columns].

    Args:
        first_row, first_column: indices in the logical tensor, if this rank holds a part of it.
    """
    keys = keys + _wrapped(first_row * _GOLDEN)
    rows = torch.arange(num_rows, dtype=torch.int32, device=keys.device)
    columns = _codes(torch.arange(num_columns, dtype=torch.int32, device=keys.device), _COLUMN)
    columns = columns + _wrapped(first_column * _COLUMN)
    row_keys = _mix(keys.unsqueeze(-1) + _codes(rows, _GOLDEN)).unsqueeze(-1)  # [2, rows, 1]
    bits = _mix(row_keys[0] ^ columns)
    bits = _mix(bits + row_keys[1])
    return quantiles[bits & 0xFFFF] + quantiles[(bits >> 16) & 0xFFFF]


@cache
def normal_quantiles(device: torch.device) -> Tensor:
    """The 65,536 quantiles of N(0, 1/2) at the middle of equal probabilities, such that the sum of two is N(0, 1).

    They are multiples of 2^-20, so that the sum of two is exact in fp32 and a last bit of `ndtri` changes none of them.
    The largest sum is 5.9.

    Shapes:
        returns fp32 [65536], ascending, symmetric about 0, with variance 1/2.
    """
    upper = -torch.special.ndtri((torch.arange(2**15, dtype=torch.float64, device="cpu") + 0.5) / 2**16)
    upper *= math.sqrt(0.5 / upper.square().mean())
    upper = torch.round(upper * 2**20) / 2**20
    return torch.cat([-upper, upper.flip(0)]).to(device, torch.float32)


def seed_rank_generator(seed: int, step: int, micro_step: int, dp_rank: int, tp_rank: int, stage: int = 0) -> None:
    """Seed torch's default generators (CPU and this rank's GPU) for dropout inside the parallel region.

    It is called before each micro-batch, so a resumed run draws the same numbers without any stored state.
    """
    text = f"region/{seed}/{step}/{micro_step}/{dp_rank}/{tp_rank}" + (f"/{stage}" if stage else "")
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    # torch.manual_seed records a stack trace for every accelerator type that is absent: a millisecond on a CPU.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
