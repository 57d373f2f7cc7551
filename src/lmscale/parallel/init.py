"""Initial weights that are the same logical tensors at every layout."""

import hashlib

import torch
from torch import Tensor, nn

from .context import ParallelContext

# Blocks a tensor is drawn in. More than the largest sensible tp_size, so that a rank draws little beyond its shard;
# fixed, because the blocks decide the numbers.
NUM_BLOCKS = 64


def initialize_parameters(module: nn.Module, seed: int, context: ParallelContext) -> None:
    """Fill every parameter with its initial value as a pure function of (seed, name), whatever the layout.

    A logical tensor is cut into 64 blocks along its shard dimension; each block is drawn in fp32 by a CPU generator
    seeded with a hash of (seed, parameter name, block). A rank draws the blocks that overlap its shard and no others,
    so the shard at tp_size 8 is exactly the slice of the tensor at tp_size 1, and the whole exists nowhere. Padded
    vocabulary rows are zero and do not shift the numbers of the others.

    Args:
        module: parameters made by `parameter` (they carry `.shard`).
        seed: any non-negative integer.
        context: gives this rank's place; nothing is communicated.

    Source: section 4.2 for the distributions; the block scheme is ours (Megatron-LM draws whole tensors on every rank).
    """
    with torch.no_grad():
        for name, param in module.named_parameters():
            spec = param.shard
            if spec.init == "normal":
                _fill_normal(param, name, seed, context)
            elif spec.init == "ones":
                param.fill_(1.0)
            else:
                param.zero_()


def _fill_normal(param: Tensor, name: str, seed: int, context: ParallelContext) -> None:
    spec = param.shard
    dim = 0 if spec.shard_dim is None else spec.shard_dim
    length = spec.full_shape[dim]
    drawn = spec.used_rows if dim == 0 and spec.used_rows is not None else length
    first = 0 if spec.shard_dim is None else context.start(length)
    last = first + param.shape[dim]
    if drawn < last:
        param.zero_()
    num_blocks = min(NUM_BLOCKS, drawn)
    borders = [drawn * i // num_blocks for i in range(num_blocks + 1)]
    generator = torch.Generator(device="cpu")
    for i, (low, high) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
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
