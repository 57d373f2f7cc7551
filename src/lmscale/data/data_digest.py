"""Digest of the data order: which sample was used at which position of the run.

The digest is the sum modulo 2^64, over all samples consumed, of a hash of (number of the sample in the run, its index
in the dataset). Ranks sum their own samples in any order and at any layout; the total identifies which samples were
seen in which order.
"""

import torch
from torch import Tensor

from ..hashing import SIGNED_GOLDEN, mix_signed
from .sampler import GlobalBatchSampler

_CHUNK = 1 << 20


def digest_of_samples(numbers: Tensor, indices: Tensor) -> Tensor:
    """Sum the hashes of samples, int64 [].

    Shapes:
        numbers, indices: int64 [n]; the sample's number in the run and its index in the dataset.
    """
    return mix_signed(numbers * SIGNED_GOLDEN + indices).sum()


def expected_digest(sampler: GlobalBatchSampler, num_steps: int, share: int = 0, num_shares: int = 1) -> Tensor:
    """Compute the digest after `num_steps` steps of the sampler's order, int64 [].

    Args:
        share, num_shares: which part of the samples to sum, so that ranks can divide the work.
    """
    consumed = num_steps * sampler.global_batch_size
    first, last = consumed * share // num_shares, consumed * (share + 1) // num_shares
    total = torch.zeros((), dtype=torch.int64)
    for start in range(first, last, _CHUNK):
        rows = torch.from_numpy(sampler.references(start, min(start + _CHUNK, last)))
        total += digest_of_samples(rows[:, 0], rows[:, 2])
    return total


def digest_text(digest: int) -> str:
    """Format a digest, torch's signed number, as 16 hexadecimal digits."""
    return f"{digest % 2**64:016x}"


def digest_number(text: str) -> int:
    """Parse `digest_text` to a signed 64-bit number."""
    return (int(text, 16) + 2**63) % 2**64 - 2**63
