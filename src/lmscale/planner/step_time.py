"""Time of an optimizer step, modelled as counted work (products, bytes, messages) over a few rates.

Legend: b micro-batch, s sequence, h hidden, f MLP width, n heads, d head size, v padded vocabulary, L layers,
p tensor ranks, D data ranks, N parameters of the rank, e bytes of a weight.

The counts below are of the paper's own code, whose kernels were not fused: each number is how many times a tensor of
that size is read or written. They are not fitted; `elementwise_factor` scales them to the passes that a machine and its
kernels make.
"""

from dataclasses import dataclass

from ..config import ParallelConfig, Recompute, TransformerConfig
from ..config.cluster import Calibration, Cluster
from ..config.family import family_of
from ..partition import part_sizes
from .communication import micro_batch_collectives
from .flops import scored_tokens
from .memory import BYTES, FP32_BYTES, HALF_BYTES
from .params import count_parameters, parameter_sizes

TILE = 128  # a device multiplies whole tiles: a width that a rank sees counts as the next multiple
HEAD_PENALTY = 64  # products of attention take 1 + 64 / d of their FLOPs' time: short inner dimensions
MEMORY_SHARE = 0.85  # of the memory's sheet bandwidth that a copy reaches
# Passes over a tensor of one layer: in the forward pass, in the backward pass.
SCORE_PASSES = (9, 12)  # [b, n/p, s, s]: scale, mask, softmax, dropout
WHOLE_PASSES = (12, 18)  # [b, s, h] on every rank: LayerNorms, biases, dropouts, residuals
SPLIT_PASSES = (16, 20)  # [b, s, h/p]: the GELU's four h, biases, heads moved to the front and back
LOGIT_PASSES = 15  # [b, s, v/p], forward and backward, a pass in fp32 counted as two
BACKWARD_SHARE = 2 / 3  # of compute, at least
PAPER_UPDATE_BYTES = 48  # per parameter, of AdamW as the paper's fp16 code had it, with the gradient's copy to fp32


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank, by kind of work.

    Args:
        matmul: matrix products.
        elementwise: everything else that reads and writes activations.
        overhead: time that more ranks do not shorten.
        tensor: all-reduces of the tensor group.
        data: exposed part of summing gradients over the data ranks; with ZeRO stage 1 also the broadcast of weights.
        optimizer: AdamW, and adding the gradients of the micro-batches.
    """

    matmul: float
    elementwise: float
    overhead: float
    tensor: float
    data: float
    optimizer: float

    @property
    def compute(self) -> float:
        """matmul + elementwise + overhead."""
        return self.matmul + self.elementwise + self.overhead

    @property
    def total(self) -> float:
        """The sum of all parts: nothing else overlaps."""
        return self.compute + self.tensor + self.data + self.optimizer


@dataclass(frozen=True)
class Techniques:
    """Techniques that the paper did not use, for what-if tables; the defaults are this project's, with one exception.

    This project reduces gradients during the last backward pass (DDP, `GradientBuffer`). A plan counts their full time:
    how much of it is hidden was not measured on any cluster.

    Args:
        tensor_overlap: share of the tensor group's time that overlaps with products, 0 to 1.
        hides_gradients: the gradients' all-reduce overlaps with the last backward pass.
        gradient_bytes: of one gradient as it is sent; None: 4 for half types, else e.
        update_bytes: that AdamW reads and writes per parameter and step; None: those of this project's kernels.
    """

    tensor_overlap: float = 0.0
    hides_gradients: bool = False
    gradient_bytes: int | None = None
    update_bytes: int | None = None

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

    Products: their FLOPs, widths in whole tiles, over `matmul_share` of the peak; with fp8 only linear layers are in
    float8, other products in bf16. Element-wise work: counted bytes times `elementwise_factor` over the memory's
    bandwidth. Overhead: `layer_overhead_ms` per layer, 3/4 of it without full recomputation. Collectives: 2 (p - 1) / p
    of an all-reduce's bytes over the bandwidth, half of that for the others, and a latency each. AdamW and the
    sum of gradients over micro-batches: bytes read and written. Nothing overlaps except by `techniques`.

    Args:
        micro_batch_size: sequences b of one forward pass.
        num_micro_batches: forward passes of a step.
        seq_length: tokens s.
        dtype: of weights and activations.
        techniques: for what-if tables.
        half_moments: AdamW's moments are bf16.

    Raises:
        ValueError: `layout.tp_size` does not divide the model; the devices do not have the type.

    Source: the form is this project's own; Hockney 1994 for the cost of a message, Patarasuk and Yuan 2009 for the
    ring's 2 (p - 1) / p.
    """
    constants, tp_size = cluster.calibration, layout.tp_size
    rate = cluster.peak_flops_per_s(dtype) * constants.matmul_share
    other_rate = cluster.peak_flops_per_s("bf16") * constants.matmul_share if dtype == "fp8" else rate
    linears, others = _tiled_flops(config, tp_size, micro_batch_size, seq_length)
    num_bytes = _elementwise_bytes(config, layout, micro_batch_size, seq_length, dtype, constants)
    memory_rate = MEMORY_SHARE * cluster.memory_bandwidth_gb_s * 1e9
    repeats = 1.0 if config.recompute is Recompute.FULL else 0.75  # forward, forward again, backward twice as long
    messages = micro_batch_collectives(config, layout, micro_batch_size, seq_length, dtype)
    tensor = sum(m.count * _collective_s(m.kind, m.num_bytes, tp_size, cluster, tp_size) for m in messages)
    num_parameters = count_parameters(config, tp_size).per_rank
    micro_batch = StepTime(
        matmul=linears / rate + others / other_rate,
        elementwise=constants.elementwise_factor * num_bytes / memory_rate,
        overhead=config.num_layers * constants.layer_overhead_ms * 1e-3 * repeats,
        tensor=tensor * (1.0 - techniques.tensor_overlap),
        data=0.0,
        optimizer=0.0,
    )
    each_gradient = techniques.gradient_bytes or max(BYTES[dtype], FP32_BYTES)
    d, span, num_owned = layout.dp_size, layout.world_size, num_parameters
    if layout.cuts_optimizer:
        num_owned = max(part_sizes(parameter_sizes(config, tp_size), d))
        data = _collective_s("reduce", each_gradient * num_parameters, d, cluster, span)
        weights = _collective_s("broadcast", BYTES[dtype] * num_parameters, d, cluster, span)
    else:
        data, weights = _collective_s("all_reduce", each_gradient * num_parameters, d, cluster, span), 0.0
    if techniques.hides_gradients:  # only during the last micro-batch: earlier sums are incomplete
        data = max(0.0, data - micro_batch.compute * BACKWARD_SHARE)
    if techniques.update_bytes is None:
        moved = gradient_sum_bytes(dtype, layout.cuts_optimizer, num_micro_batches) * num_parameters
        moved += update_bytes(dtype, half_moments) * num_owned
    else:
        moved = techniques.update_bytes * num_owned
    return StepTime(
        matmul=num_micro_batches * micro_batch.matmul,
        elementwise=num_micro_batches * micro_batch.elementwise,
        overhead=num_micro_batches * micro_batch.overhead,
        tensor=num_micro_batches * micro_batch.tensor,
        data=data + weights,
        optimizer=moved / memory_rate,
    )


def update_bytes(dtype: str, half_moments: bool = False) -> int:
    """Bytes per parameter that a compiled update moves: the norm and AdamW read the gradient, AdamW reads and writes
    master and moments and writes the weight of a half type. Counted in `tests/cuda/test_optimizer_kernels.py`."""
    wide = max(BYTES[dtype], FP32_BYTES)
    moments = 2 * (HALF_BYTES if half_moments else wide)
    return 2 * wide + 2 * (wide + moments) + (BYTES[dtype] if BYTES[dtype] < FP32_BYTES else 0)


def gradient_sum_bytes(dtype: str, cuts_optimizer: bool, num_micro_batches: int) -> int:
    """Bytes per parameter that `GradientBuffer` moves in a step: the first gradient is copied, the others are added.
    Without a buffer autograd adds them in their own type."""
    e, wide = BYTES[dtype], max(BYTES[dtype], FP32_BYTES)
    copied = e + wide if e < FP32_BYTES or cuts_optimizer else 0
    return copied + (num_micro_batches - 1) * (e + 2 * wide)


def _collective_s(kind: str, num_bytes: int, num_ranks: int, cluster: Cluster, span: int) -> float:
    """Seconds of one collective of a ring whose ranks lie within `span` neighbouring devices."""
    if num_ranks == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1  # it is a reduce-scatter and an all-gather
    return rounds * (num_ranks - 1) / num_ranks * num_bytes / cluster.bandwidth(span) + cluster.latency_us * 1e-6


def _tiled_flops(config: TransformerConfig, tp_size: int, b: int, s: int) -> tuple[float, float]:
    """FLOPs of a rank's micro-batch in whole tiles, recomputation included: of the layers' linear layers, of all other
    products."""
    num_tokens, h = b * s, config.hidden_size
    width, mlp = _tiles(h / tp_size), _tiles(config.ffn_size / tp_size)
    linears = 2 * num_tokens * h * (_tiles(3 * h / tp_size) + width + 2 * mlp)
    scores = 4 * b * s * s * (h / tp_size) * (1 + HEAD_PENALTY / config.head_size)
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

    stays_on_chip = constants.fused_attention and config.attention == "sdpa"
    scores = 0 if stays_on_chip else passes(SCORE_PASSES, scores_again)
    whole_ranks = tp_size if layout.cuts_sequence else 1
    layer = scores * b * config.num_attention_heads * s * s / tp_size
    layer += passes(WHOLE_PASSES, runs_again) * b * s * h / whole_ranks
    layer += passes(SPLIT_PASSES, runs_again) * b * s * h / tp_size
    logits = LOGIT_PASSES * b * scored_tokens(config, s) * config.padded_vocab_size / tp_size
    return e * (config.num_layers * layer + logits)
