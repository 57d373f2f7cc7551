"""Every operation of one optimizer step of one rank: FLOPs, bytes and launches, counted from this project's code.

Legend: b micro-batch, s sequence, h hidden, f MLP width, v padded vocabulary, L layers, p tensor ranks, N parameters of
the rank, e bytes of a weight, m scored tokens.

The rows of a layer are the kernels that torch.compile generates for it on a GPU; `tests/cuda/test_layer_bytes.py`
compares both. Around the layers operations run one by one. Collectives are in `communication.py`.
"""

import dataclasses
from collections import Counter

from ..config import Layout, Recompute, TransformerConfig
from ..config.family import family_of
from ..partition import assign_owners, rows_at_once
from .flops import scored_tokens
from .layer_operations import LayerCounts
from .memory import BYTES, FP32_BYTES, HALF_BYTES
from .operation import Operation, elementwise, product, times
from .params import parameter_sizes

OPTIMIZER_LAUNCHES = 27  # of the norm and the counters, besides one per parameter
HOST_SYNCS = 0  # per step
LAUNCHES_OF_A_LOSS_CHUNK = 44  # besides its three products
ELEMENTS_PER_LAUNCH = 320 * 65536  # of torch's multi-tensor kernels


def step_operations(
    config: TransformerConfig,
    layout: Layout,
    micro_batch_size: int,
    num_micro_batches: int,
    seq_length: int,
    dtype: str,
    half_moments: bool = False,
) -> tuple[Operation, ...]:
    """The operations of one rank in one optimizer step on a GPU with compiled layers.

    Their FLOPs are those of `hardware_flops_per_step`, over p, and of the family's dense heads, which every rank
    computes whole, except that selective recomputation leaves a fused attention core alone.

    Args:
        micro_batch_size: sequences b of one forward pass.
        num_micro_batches: forward passes of a step.
        seq_length: tokens s.
        dtype: of weights and activations.
        half_moments: the moments are bf16.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    config.check_tensor_parallel(layout.tp_size, layout.pad_heads)
    parts = layout.batch_parts
    once = []
    for placement, number in Counter(config.layer_placements).items():
        layer = LayerCounts(config, placement, layout, micro_batch_size // parts, seq_length, dtype)
        in_layer = layer.forward("forward") + layer.backward()
        if config.recompute is Recompute.FULL:
            in_layer += layer.forward("recomputation")
        elif config.recompute is Recompute.SELECTIVE:
            in_layer += layer.core_again()
        once += [times(number * parts, operation) for operation in in_layer]
        if parts > 1:
            once.append(times(number, layer.gradients_read_again()))
    once += _embedding(config, layout, micro_batch_size, seq_length, BYTES[dtype])
    once += _head(config, layout, micro_batch_size, seq_length, BYTES[dtype])
    micro_batch = [times(num_micro_batches, operation) for operation in once]
    return (*micro_batch, *_update(config, layout, num_micro_batches, dtype, half_moments))


def _embedding(config: TransformerConfig, layout: Layout, b: int, s: int, e: int) -> list[Operation]:
    """Embeddings and the LayerNorm after the stack. The lookups run one by one; what follows them is compiled."""
    h, whole = config.hidden_size, b * s * config.hidden_size
    own = whole // layout.tp_size if layout.cuts_sequence else whole
    table = config.padded_vocab_size // layout.tp_size * h * e
    has_types, has_norm = family_of(config.family).num_token_types > 0, config.placement.after_embedding
    found = [
        elementwise("embedding", "forward", int(2.5 * whole * e), 2 * whole * e, 7),
        # the lookup's gradient is added to that of the output projection
        elementwise("embedding", "backward", 2 * whole * e + 2 * table, whole * e + 2 * table, 4),
    ]
    if layout.cuts_sequence and layout.batch_parts > 1:  # gathered rank by rank, each with tokens of both halves
        found.append(elementwise("output of the last layer, gathered", "forward", whole * e, whole * e))
        found.append(elementwise("gradient of this rank's tokens", "backward", own * e, own * e))
    if has_types:
        found.append(elementwise("token types", "forward", own * e, own * e))
        found.append(elementwise("token types", "backward", own * e, 0))
    name, changes = "embedding sum, dropout", has_norm or config.input_dropout > 0
    found.append(elementwise(name, "forward", (1 + has_types) * own * e, (1 + has_norm) * own * e))
    # The gradient of the positions is summed in the same kernel, but with a LayerNorm in one of its own.
    read, launches = (3, 4) if has_norm else (1, 1)
    found.append(elementwise(name, "backward", read * own * e, changes * own * e, launches))
    if config.placement.after_stack:
        found.append(elementwise("final LayerNorm", "forward", own * e, own * e))
        found.append(elementwise("final LayerNorm", "backward", 4 * own * e, own * e, 3))
    return found


def _head(config: TransformerConfig, layout: Layout, b: int, s: int, e: int) -> list[Operation]:
    """The family's dense heads, then projection and loss in chunks, with their gradients in the forward pass."""
    h, columns = config.hidden_size, config.padded_vocab_size // layout.tp_size
    rows, sizes = b * scored_tokens(config, s), family_of(config.family).head
    found = []
    for name, num, multiply_adds in zip(
        ("token head", "sequence head"), (rows, b), sizes.multiply_adds(h), strict=True
    ):
        if multiply_adds:
            n = multiply_adds // h
            found.append(product(name, "forward", num, n, h, e))
            found.append(product(name, "backward", num, h, n, e))
            found.append(product(name, "backward", n, h, num, e))
    if sizes.num_tensors:  # rows picked, activation, LayerNorm
        found.append(elementwise("token head, GELU and LayerNorm", "forward", 3 * rows * h * e, 3 * rows * h * e, 3))
        passes = 8 * rows * h * e
        found.append(elementwise("token head, GELU and LayerNorm", "backward", passes, rows * h * e + b * s * h * e, 7))
    at_once = rows_at_once(columns, on_gpu=True)
    several = rows > at_once
    for num, chunk in ((rows // at_once, at_once), (1, rows % at_once)):
        if num * chunk == 0:
            continue
        logits, table = chunk * columns, columns * h
        biased = logits * e if sizes.num_tensors else 0  # its gradient is a sum of its own
        found += [
            times(num, product("logits", "forward", chunk, columns, h, e)),
            times(num, product("logits, gradient of the input", "forward", chunk, h, columns, e)),
            times(num, product("logits, gradient of the weight", "forward", columns, h, chunk, e)),
            times(num, elementwise("loss", "forward", 2 * logits * e + biased, logits * e, LAUNCHES_OF_A_LOSS_CHUNK)),
        ]
        if several:
            found.append(times(num, elementwise("sum of the chunks", "forward", table * (4 + e), table * 4)))
    weight = columns * h
    rounded = (4 * weight, e * weight) if several else (0, 0)
    scaled = (weight + rows * h) * e  # by the gradient of the loss
    return [*found, elementwise("loss", "backward", scaled + rounded[0], scaled + rounded[1], 3)]


def _update(
    config: TransformerConfig, layout: Layout, num_micro_batches: int, dtype: str, half_moments: bool
) -> list[Operation]:
    """The gradient buffer, once per micro-batch, and the optimizer."""
    e, sizes = BYTES[dtype], parameter_sizes(config, layout.tp_size, layout.pad_heads)
    n, wide = sum(sizes), max(BYTES[dtype], FP32_BYTES)
    found = []
    if e < FP32_BYTES or layout.cuts_optimizer:
        added = elementwise("gradient buffer", "gradients", n * (e + wide), n * wide, len(sizes))
        found.append(dataclasses.replace(added, read=n * e))  # the first micro-batch is copied, the others are added
        if num_micro_batches > 1:
            found.append(times(num_micro_batches - 1, added))
    owners = assign_owners(sizes, layout.dp_size if layout.cuts_optimizer else 1)
    parts = Counter()
    for size, owner in zip(sizes, owners, strict=True):
        parts[owner] += size
    # Of the ranks with most elements the slowest one, which has most tensors.
    owned, num_owned = max((number, owners.count(owner)) for owner, number in parts.items())
    # Per parameter the norm reads the gradient; one kernel per tensor reads gradient, master and moments, and writes
    # master, moments and the weight of a half type (`tests/cuda/test_optimizer_kernels.py`).
    moments = 2 * (HALF_BYTES if half_moments else wide)
    read, written = 3 * wide + moments, wide + moments + (e if e < FP32_BYTES else 0)
    launches = num_owned + OPTIMIZER_LAUNCHES + -(-owned // ELEMENTS_PER_LAUNCH)
    return [*found, elementwise("AdamW", "optimizer", owned * read, owned * written, launches)]
