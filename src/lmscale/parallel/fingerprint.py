"""Hashes of tensors, to check that replicas on different ranks are equal."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..hashing import SIGNED_GOLDEN

_CHUNK = 1 << 22  # elements hashed at a time: 32 MiB of temporaries each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits and their positions, int64 [], on its device; cheap, not cryptographic.

    It is the sum over i of (bits_i + 1) (2 i + 1) c modulo 2^64, with c odd; 64-bit values are mixed first. Any single
    change changes it, and so does any swap of two different values of up to 32 bits. Of 64-bit values a swap goes
    unseen with a chance of 2^-63 times the largest power of two that divides their distance. 0.0 and -0.0 differ; nan
    equals itself.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, bits.numel(), _CHUNK):
        part = bits[first : first + _CHUNK].to(torch.int64)
        if flat.element_size() == 8:
            part = _mix(part)
        weights = torch.arange(first, first + part.numel(), dtype=torch.int64, device=tensor.device)
        total += ((part + 1) * (2 * weights + 1)).sum()
    return total * SIGNED_GOLDEN


def _mix(x: Tensor) -> Tensor:
    """Another int64 for each, whose low bits depend on all bits: +1.0 and -1.0 differ in the highest bit alone, which a
    product with an even number loses."""
    for _ in range(2):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * SIGNED_GOLDEN  # torch's >> keeps the sign, hence the mask
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def first_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> str | None:
    """Name of the first tensor whose bits differ between the ranks of `group`, or None; the same on all ranks.

    Args:
        tensors: in the same order on all ranks.
        group: None for a group of one.

    Communicates:
        one all-reduce of 2 int64 per tensor over `group`.
    """
    if group is None or dist.get_world_size(group) == 1 or not tensors:
        return None
    hashes = torch.stack([fingerprint(tensor) for tensor in tensors.values()])
    bounds = torch.stack([hashes, ~hashes])  # the maximum of ~h is ~ of the minimum of h
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    differs = bounds[0] != ~bounds[1]
    return list(tensors)[int(differs.nonzero()[0])] if bool(differs.any()) else None
