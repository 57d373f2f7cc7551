"""Time of an optimizer step, modelled as counted work (products, bytes, messages) over a few rates.

Legend: b micro-batch, s sequence, h hidden, f MLP width, n heads, d head size, v padded vocabulary, L layers,
p tensor ranks, D data ranks, N parameters of the rank, e bytes of a weight.

On a GPU with a `roofline` the counts are those of this project's code, in `operations.py`. The passes below are for
clusters without one. They are of the paper's own code, whose kernels were not fused: each number is how many times a
tensor of that size is read or written. They are not fitted; `elementwise_factor` scales them to the passes that a
machine and its kernels make.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config import ParallelConfig, Recompute, TransformerConfig
from ..config.cluster import Calibration, Cluster
from ..config.family import family_of
from ..partition import part_sizes
from .communication import Collective, micro_batch_collectives, small_collectives
from .flops import scored_tokens
from .memory import BYTES, FP32_BYTES
from .operation import Operation
from .operations import step_operations
from .overlap import exposed_shares
from .params import count_parameters, parameter_sizes
from .roofline import launch_s, operation_s

TILE = 128  # a device multiplies whole tiles: a width that a rank sees counts as the next multiple
HEAD_PENALTY = 64  # products of attention take 1 + 64 / d of their FLOPs' time: short inner dimensions
MEMORY_SHARE = 0.85  # of the memory's sheet bandwidth that a copy reaches
# Passes over a tensor of one layer: in the forward pass, in the backward pass.
SCORE_PASSES = (9, 12)  # [b, n/p, s, s]: scale, mask, softmax, dropout
WHOLE_PASSES = (12, 18)  # [b, s, h] on every rank: LayerNorms, biases, dropouts, residuals
SPLIT_PASSES = (16, 20)  # [b, s, h/p]: the GELU's four h, biases, heads moved to the front and back
LOGIT_PASSES = 15  # [b, s, v/p], forward and backward, a pass in fp32 counted as two
BACKWARD_SHARE = 2 / 3  # of compute, at least
# AdamW, bytes per parameter of half types: gradient read in fp16 and written in fp32 6, its norm 4, unscaled and
# clipped 8, state and master read 16 and written 12, weight written 2.
HALF_OPTIMIZER_BYTES = 48
FULL_OPTIMIZER_PASSES = 10  # of other types, times e: norm 1, clipped 2, state read 4 and written 3
_PART_OF = {"product": "matmul", "attention": "matmul", "elementwise": "elementwise", "optimizer": "optimizer"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank, by kind of work.

    Args:
        matmul: matrix products.
        elementwise: everything else that reads and writes activations.
        overhead: time that more ranks do not shorten.
        tensor: messages of the tensor group, as far as nothing hides them.
        data: exposed part of summing gradients over the data ranks; with ZeRO stage 1 also the broadcast of weights.
        optimizer: AdamW.
        tensor_hidden: the rest of the tensor group's messages, behind computation; no part of `total`.
    """

    matmul: float
    elementwise: float
    overhead: float
    tensor: float
    data: float
    optimizer: float
    tensor_hidden: float = 0.0

    @property
    def compute(self) -> float:
        """matmul + elementwise + overhead."""
        return self.matmul + self.elementwise + self.overhead

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.compute + self.tensor + self.data + self.optimizer


@dataclass(frozen=True)
class Techniques:
    """Techniques that the paper did not use, for what-if tables; the defaults are this project's, with one exception.

    This project reduces gradients during the last backward pass (`GradientBuffer`). A plan counts their full time:
    how much of it is hidden was not measured on any cluster.

    Args:
        tensor_overlap: share of the tensor group's remaining time that overlaps with products, 0 to 1.
        hides_gradients: the gradients' all-reduce overlaps with the last backward pass.
        gradient_bytes: of one gradient as it is sent; None: 4 for half types, else e.
    """

    tensor_overlap: float = 0.0
    hides_gradients: bool = False
    gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_overlap <= 1:
            raise ValueError(f"`tensor_overlap` must be at least 0 and at most 1, but is {self.tensor_overlap!r}")


AS_TRAINED = Techniques()


def predict_step_time(
    config: TransformerConfig,
    layout: ParallelConfig,
    micro_batch_size: int,
    num_micro_batches: int,
    seq_length: int,
    dtype: str,
    cluster: Cluster,
    techniques: Techniques = AS_TRAINED,
    half_moments: bool = False,
) -> StepTime:
    """Seconds of one optimizer step.

    On a cluster with a `roofline`: each of `step_operations` at the roofline of the device (`operation_s`), and the
    launches; messages of layers as far as the compiled code does not hide them (`exposed_shares`). On others the
    products' FLOPs, widths in whole tiles, over `matmul_share` of the peak (with fp8 only linear layers are in float8,
    other products in bf16); bytes of element-wise work times `elementwise_factor` over the memory's bandwidth;
    `layer_overhead_ms` per layer, 3/4 of it without full recomputation; AdamW's bytes, 48 N for half types.
    Collectives: 2 (p - 1) / p of an all-reduce's bytes over the bandwidth, half of that for the others, and a latency
    each; the pieces of a sum over the data ranks follow each other and have one latency together. Nothing else
    overlaps, except by `techniques`. Without a `roofline` the `small_collectives` are left out.

    Args:
        micro_batch_size: sequences b of one forward pass.
        num_micro_batches: forward passes of a step.
        seq_length: tokens s.
        dtype: of weights and activations.
        techniques: for what-if tables.
        half_moments: AdamW's moments are bf16; counted with a `roofline`.

    Raises:
        ValueError: `layout.tp_size` does not divide the model; the devices do not have the type.

    Source: the form is this project's own; Hockney 1994 for the cost of a message, Patarasuk and Yuan 2009 for the
    ring's 2 (p - 1) / p.
    """
    tp_size = layout.tp_size
    on_gpu = cluster.roofline is not None  # the other clusters' constants were fitted to the smaller loss chunks
    messages = micro_batch_collectives(config, layout, micro_batch_size, seq_length, dtype, on_gpu)
    tensor = sum(exposed_s(messages, config, layout, micro_batch_size, seq_length, dtype, cluster))
    tensor *= num_micro_batches * (1.0 - techniques.tensor_overlap)
    hidden = num_micro_batches * sum(collective_s(message, layout, cluster) for message in messages) - tensor
    if cluster.roofline is not None:
        counted = config, layout, micro_batch_size, num_micro_batches, seq_length, dtype
        local = _roofline_time(step_operations(*counted, half_moments), cluster, dtype)
    else:
        local = _passes_time(config, layout, micro_batch_size, num_micro_batches, seq_length, dtype, cluster)
    num_parameters = count_parameters(config, tp_size, layout.pad_heads).per_rank
    each_gradient = techniques.gradient_bytes or max(BYTES[dtype], FP32_BYTES)
    d, span = layout.dp_size, layout.world_size
    if layout.cuts_optimizer:
        data = _message_s("reduce", each_gradient * num_parameters, d, cluster, span)
        weights = _message_s("broadcast", BYTES[dtype] * num_parameters, d, cluster, span)
    else:
        data, weights = _message_s("all_reduce", each_gradient * num_parameters, d, cluster, span), 0.0
    if techniques.hides_gradients:  # only during the last micro-batch: earlier sums are incomplete
        data = max(0.0, data - local.compute / num_micro_batches * BACKWARD_SHARE)
    data += weights
    for message in small_collectives(config, layout, dtype) if on_gpu else ():
        seconds = collective_s(message, layout, cluster)
        tensor, data = (tensor + seconds, data) if message.group == "tensor" else (tensor, data + seconds)
    return dataclasses.replace(local, tensor=tensor, data=data, tensor_hidden=hidden)


def _roofline_time(operations: Iterable[Operation], cluster: Cluster, dtype: str) -> StepTime:
    """Seconds of a rank's own work, from the counts of this project's code."""
    seconds = dict.fromkeys(("matmul", "elementwise", "overhead", "optimizer"), 0.0)
    for operation in operations:
        seconds[_PART_OF[operation.kind]] += operation_s(operation, cluster, dtype)
        seconds["overhead"] += launch_s(operation, cluster)
    return StepTime(**seconds, tensor=0.0, data=0.0)


def _passes_time(
    config: TransformerConfig,
    layout: ParallelConfig,
    b: int,
    num_micro_batches: int,
    s: int,
    dtype: str,
    cluster: Cluster,
) -> StepTime:
    """Seconds of a rank's own work, from counted passes."""
    constants, tp_size = cluster.calibration, layout.tp_size
    rate = cluster.peak_flops_per_s(dtype) * constants.matmul_share
    other_rate = cluster.peak_flops_per_s("bf16") * constants.matmul_share if dtype == "fp8" else rate
    linears, others = _tiled_flops(config, tp_size, b, s)
    num_bytes = _elementwise_bytes(config, layout, b, s, dtype, constants)
    memory_rate = MEMORY_SHARE * cluster.memory_bandwidth_gb_s * 1e9
    repeats = 1.0 if config.recompute is Recompute.FULL else 0.75  # forward, forward again, backward twice as long
    num_owned = count_parameters(config, tp_size, layout.pad_heads).per_rank
    if layout.cuts_optimizer:
        num_owned = max(part_sizes(parameter_sizes(config, tp_size, layout.pad_heads), layout.dp_size))
    is_half = BYTES[dtype] < FP32_BYTES
    optimizer_bytes = HALF_OPTIMIZER_BYTES if is_half else FULL_OPTIMIZER_PASSES * BYTES[dtype]
    return StepTime(
        matmul=num_micro_batches * (linears / rate + others / other_rate),
        elementwise=num_micro_batches * constants.elementwise_factor * num_bytes / memory_rate,
        overhead=num_micro_batches * config.num_layers * constants.layer_overhead_ms * 1e-3 * repeats,
        tensor=0.0,
        data=0.0,
        optimizer=optimizer_bytes * num_owned / memory_rate,
    )


def exposed_s(
    messages: Sequence[Collective],
    config: TransformerConfig,
    layout: ParallelConfig,
    micro_batch_size: int,
    seq_length: int,
    dtype: str,
    cluster: Cluster,
) -> list[float]:
    """Seconds of each collective that no computation hides; on a cluster without a `roofline` all of them.

    Hidden are messages of layers (`exposed_shares`), recomputed ones as those of the forward pass.
    """
    whole = [collective_s(message, layout, cluster) for message in messages]
    if cluster.roofline is None or layout.tp_size == 1:
        return whole
    each = {message.what: seconds / message.count for message, seconds in zip(messages, whole, strict=True)}
    shares = exposed_shares(config, layout, micro_batch_size, seq_length, dtype, cluster, each)
    return [
        seconds * shares.get(message.what.removesuffix(", recomputed"), 1.0)
        for message, seconds in zip(messages, whole, strict=True)
    ]


def collective_s(message: Collective, layout: ParallelConfig, cluster: Cluster) -> float:
    """Seconds of all of a collective, when nothing overlaps with it."""
    num_ranks = layout.tp_size if message.group == "tensor" else layout.dp_size
    # Groups of consecutive ranks lie within nodes only if they divide one; else some group is on two of several nodes.
    whole = message.group == "tensor" and cluster.devices_per_node % layout.tp_size == 0
    span = layout.tp_size if whole else layout.world_size
    return message.count * _message_s(message.kind, message.num_bytes, num_ranks, cluster, span)


def _message_s(kind: str, num_bytes: int, num_ranks: int, cluster: Cluster, span: int) -> float:
    """Seconds of one collective of a ring whose ranks lie within `span` neighbouring devices."""
    if num_ranks == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1  # it is a reduce-scatter and an all-gather
    return rounds * (num_ranks - 1) / num_ranks * num_bytes / cluster.bandwidth(span) + cluster.latency_us * 1e-6


def _tiled_flops(config: TransformerConfig, tp_size: int, b: int, s: int) -> tuple[float, float]:
    """FLOPs of a rank's micro-batch in whole tiles, recomputation included: of the layers' linear layers, of all other
    products."""
    num_tokens, h = b * s, config.hidden_size
    inner, mlp = config.padded_width(tp_size) / tp_size, _tiles(config.ffn_size / tp_size)
    linears = 2 * num_tokens * h * (_tiles(3 * inner) + _tiles(inner) + 2 * mlp)
    scores = 4 * b * s * s * inner * (1 + HEAD_PENALTY / config.head_size)
    num_scored = b * scored_tokens(config, s)
    logits = 2 * num_scored * h * _tiles(config.padded_vocab_size / tp_size)
    core_again = 0.5 if config.attention == "exact" else 1.0  # see `hardware_flops_per_step`
    again = {Recompute.NONE: 0.0, Recompute.SELECTIVE: core_again, Recompute.FULL: 1.0}[config.recompute]
    linear_passes = 4 if config.recompute is Recompute.FULL else 3
    heads = 6 * num_scored * family_of(config.family).head.multiply_adds(h)[0]
    cores = config.num_layers * scores * (3 + again)
    return config.num_layers * linears * linear_passes, cores + 3 * logits + heads


def _tiles(width: float) -> int:
    return -(-int(width) // TILE) * TILE


def _elementwise_bytes(
    config: TransformerConfig, layout: ParallelConfig, b: int, s: int, dtype: str, constants: Calibration
) -> float:
    """Bytes of a rank's micro-batch that element-wise work reads and writes."""
    e, h, tp_size = BYTES[dtype], config.hidden_size, layout.tp_size
    runs_again = {Recompute.NONE: 0, Recompute.SELECTIVE: 0, Recompute.FULL: 1}[config.recompute]
    scores_again = 0 if config.recompute is Recompute.NONE else 1

    def passes(counted: tuple[int, int], again: int) -> int:
        return counted[0] * (1 + again) + counted[1]

    stays_on_chip = constants.fused_attention and config.attention != "exact"
    scores = 0 if stays_on_chip else passes(SCORE_PASSES, scores_again)
    whole_ranks = tp_size if layout.cuts_sequence else 1
    layer = scores * b * config.padded_heads(tp_size) * s * s / tp_size
    layer += passes(WHOLE_PASSES, runs_again) * b * s * h / whole_ranks
    layer += passes(SPLIT_PASSES, runs_again) * b * s * h / tp_size
    logits = LOGIT_PASSES * b * scored_tokens(config, s) * config.padded_vocab_size / tp_size
    return e * (config.num_layers * layer + logits)
