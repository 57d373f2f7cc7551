"""Initial weights: the same logical tensors at every layout."""

import hashlib
import itertools

import torch
from torch import Tensor, nn

from .context import ParallelContext
from .rng import counter_normal, normal_keys, normal_quantiles

# Number of blocks of a tensor. It exceeds any sensible tp_size, so a rank draws little beyond its shard. It is fixed,
# because the blocks determine the numbers.
NUM_BLOCKS = 64
NUMBERS_AT_ONCE = 2**22  # drawn by counter; bounds the memory of the hash


def initialize_parameters(
    module: nn.Module, seed: int, context: ParallelContext, initializer: str = "generator"
) -> None:
    """Initialize every parameter as a pure function of (seed, name), independent of the layout.

    The shard at tp_size 8 is exactly the slice of the tensor at tp_size 1, and no rank draws the whole tensor. Padding
    rows of the vocabulary and dummy heads are zero and do not shift the other rows' numbers.

    `generator`: a logical tensor is cut into 64 blocks along its shard dimension. Each block is drawn in fp32 by a CPU
    generator seeded with a hash of (seed, parameter name, block). A rank draws the blocks that overlap its shard.

    `counter`: each number of a matrix is a hash of (seed, parameter name, row, column), on the parameter's device; the
    distribution is that of the generator, the numbers are others.

    Args:
        module: its parameters were made by `parameter` (they carry `.shard`).
        seed: any non-negative integer.
        context: this rank's place; nothing is communicated.
        initializer: `generator` or `counter`.

    Raises:
        ValueError: a parameter of another layer, which does not say how to draw, cut and save it.

    Source: section 4.2 for the distributions; both schemes are ours (Megatron-LM draws whole tensors on every rank).
    """
    draw = {"generator": _draw_by_generator, "counter": _draw_by_counter}[initializer]
    with torch.no_grad():
        for name, param in module.named_parameters():
            if not hasattr(param, "shard"):
                raise ValueError(
                    "parameters must be those of lmscale.parallel's layers (ReplicatedLinear, LayerNorm, ...), but "
                    f"{name} is not"
                )
            spec = param.shard
            param.is_initialized = True
            if spec.init == "normal":
                draw(param, name, seed, context)
                if any(gain != 1.0 for _, gain in spec.row_gains):
                    pattern = torch.cat([torch.full((rows, 1), gain) for rows, gain in spec.row_gains])
                    param.mul_(pattern.repeat(len(param) // len(pattern), 1).to(param))
            elif spec.init == "ones":
                param.fill_(1.0)
            else:
                param.zero_()


def _draw_by_generator(param: Tensor, name: str, seed: int, context: ParallelContext) -> None:
    spec = param.shard
    dim = 0 if spec.shard_dim is None else spec.shard_dim
    length = spec.full_shape[dim]
    drawn = spec.used_rows if dim == 0 and spec.used_rows is not None else length
    first = 0 if spec.shard_dim is None else context.tp_rank * param.shape[dim]
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


def _draw_by_counter(param: Tensor, name: str, seed: int, context: ParallelContext) -> None:
    spec, keys = param.shard, normal_keys(seed, name).to(param.device)
    first, (num_rows, num_columns) = [0, 0], spec.full_shape
    if spec.shard_dim is not None:
        first[spec.shard_dim] = context.tp_rank * param.shape[spec.shard_dim]
    num_rows = num_rows if spec.used_rows is None else spec.used_rows
    drawn = param[: max(num_rows - first[0], 0), : max(num_columns - first[1], 0)]
    if drawn.shape != param.shape:
        param.zero_()
    rows_at_once = max(1, NUMBERS_AT_ONCE // param.shape[1])
    for part in drawn.split(rows_at_once):
        numbers = counter_normal(keys, *part.shape, *first, normal_quantiles(param.device))
        part.copy_(numbers.mul_(spec.std))
        first[0] += len(part)
