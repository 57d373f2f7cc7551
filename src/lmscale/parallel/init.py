"""Initial weights: the same logical tensors at every layout."""

import hashlib
import itertools

import torch
from torch import Tensor, nn

from .context import ParallelContext

# Number of blocks of a tensor. It exceeds any sensible tp_size, so a rank draws little beyond its shard. It is fixed,
# because the blocks determine the numbers.
NUM_BLOCKS = 64


def initialize_parameters(module: nn.Module, seed: int, context: ParallelContext) -> None:
    """Initialize every parameter as a pure function of (seed, name), independent of the layout.

    A logical tensor is cut into 64 blocks along its shard dimension. Each block is drawn in fp32 by a CPU generator
    seeded with a hash of (seed, parameter name, block). A rank draws only the blocks that overlap its shard, so the
    shard at tp_size 8 is exactly the slice of the tensor at tp_size 1, and no rank holds the whole tensor. Padding rows
    of the vocabulary are zero and do not shift the other rows' numbers.

    Args:
        module: its parameters were made by `parameter` (they carry `.shard`).
        seed: any non-negative integer.
        context: this rank's place; nothing is communicated.

    Source: section 4.2 for the distributions; the block scheme is ours (Megatron-LM draws whole tensors on every rank).
    """
    with torch.no_grad():
        for name, param in module.named_parameters():
            spec = param.shard
            if spec.init == "normal":
                _draw_normal(param, name, seed, context)
            elif spec.init == "ones":
                param.fill_(1.0)
            else:
                param.zero_()


def _draw_normal(param: Tensor, name: str, seed: int, context: ParallelContext) -> None:
    spec = param.shard
    dim = 0 if spec.shard_dim is None else spec.shard_dim
    length = spec.full_shape[dim]
    drawn = spec.used_rows if dim == 0 and spec.used_rows is not None else length
    first = 0 if spec.shard_dim is None else context.start(length)
    last = first + param.shape[dim]
    if drawn < last:
        param.zero_()
    num_blocks = min(NUM_BLOCKS, drawn)
    bounds = [drawn * i // num_blocks for i in range(num_blocks + 1)]
    generator = torch.Generator(device="cpu")
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        overlap_low, overlap_high = max(low, first), min(high, last)
        if overlap_low >= overlap_high:
            continue
        digest = hashlib.blake2b(f"{seed}/{name}/{i}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        shape = list(spec.full_shape)
        shape[dim] = high - low
        block = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, spec.std, generator=generator)
        part = block.narrow(dim, overlap_low - low, overlap_high - overlap_low)
        param.narrow(dim, overlap_low - first, overlap_high - overlap_low).copy_(part)
