"""Time of one operation on a device: the slower of its arithmetic and its bytes, and its launches.

Legend: s sequence, d head size.
"""

import math

from ..config.cluster import Cluster
from .operation import Core, Operation, Product

# Rows and columns of a product that one multiprocessor computes at a time, and parts into which a product may cut its
# inner dimension when it has few tiles; the fastest combination counts.
TILES = ((128, 256), (256, 128), (128, 128))
PARTS = (1, 2, 3, 4, 6, 8)
SMALL_TILE_COST = 1.1  # of a tile of 128 x 128, which loads more operands per FLOP
# FlashAttention-2 on an H100: at s tokens s / (s + half) of the rate of long sequences. Its forward pass, its backward
# pass; causal besides. A causal core counts half of the scores and reaches 0.905 of the rate.
HALF_RATE_TOKENS = (70, 240)
CAUSAL_HALF_RATE_TOKENS, CAUSAL_SHARE = 230, 0.905
HEAD_SIZES = {64: 0.88, 128: 1.0, 256: 0.8}  # sizes that kernels are written for, with the share of the rate
DROPOUT_SHARE = 0.8  # of the rate with attention dropout, assumed
BACKWARD_FLOPS = 1.25  # with the scores that the backward pass recomputes


def operation_s(operation: Operation, cluster: Cluster, dtype: str) -> float:
    """Seconds of all of an operation, without its launches.

    Source: Williams et al. 2009 (roofline); Dao 2023 and Shah et al. 2024, Figures 5 and 6 (rates of attention cores).
    """
    rates, work = cluster.roofline, operation.work
    share = 1.0 if isinstance(work, Product) else rates.memory_share
    seconds = operation.num_bytes / (rates.copy_gb_s * 1e9 * share)
    if isinstance(work, Product):
        seconds = max(seconds, _product_s(work, cluster, dtype))
    elif isinstance(work, Core):
        seconds = max(seconds, _core_s(operation.flops, work, cluster))
    return operation.count * seconds


def launch_s(operation: Operation, cluster: Cluster) -> float:
    """Seconds between the kernels of an operation."""
    return operation.count * operation.launches * cluster.roofline.launch_us * 1e-6


def _product_s(work: Product, cluster: Cluster, dtype: str) -> float:
    """Waves of tiles, each with its start and end."""
    rates = cluster.roofline
    in_bf16 = rates.product_tflops * 1e12 * rates.product_share
    kind = "bf16" if dtype == "fp8" else dtype
    rate = in_bf16 * cluster.peak_flops_per_s(kind) / cluster.peak_flops_per_s("bf16")
    if work.float8:
        rate = rates.float8_tflops * 1e12 * rates.product_share
    fill = rates.tile_fill * rate / in_bf16  # a time, and so more elements at a higher rate
    each = rate / rates.num_processors

    def seconds(rows: int, columns: int, parts: int) -> float:
        tiles = work.batch * math.ceil(work.m / rows) * math.ceil(work.n / columns) * parts
        waves = math.ceil(tiles / rates.num_processors)
        cost = SMALL_TILE_COST if rows == columns else 1.0
        return waves * 2 * rows * columns * (work.k / parts + fill) * cost / each

    return min(seconds(rows, columns, parts) for rows, columns in TILES for parts in PARTS)


def _core_s(flops: int, work: Core, cluster: Cluster) -> float:
    size = next((size for size in HEAD_SIZES if size >= work.head_size), work.head_size)
    padded = flops * size / work.head_size * (BACKWARD_FLOPS if work.backward else 1.0)
    rates = cluster.roofline
    rate = (rates.attention_backward_tflops if work.backward else rates.attention_forward_tflops) * 1e12
    rate *= HEAD_SIZES.get(size, 0.5)
    half = HALF_RATE_TOKENS[work.backward]
    if work.causal:
        padded, rate, half = padded / 2, rate * CAUSAL_SHARE, half + CAUSAL_HALF_RATE_TOKENS
    if work.drops:
        rate *= DROPOUT_SHARE
    return padded / (rate * work.seq_length / (work.seq_length + half))
