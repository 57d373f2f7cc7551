"""One kind of operation of a training step: its counts, and its time by a roofline.

Legend: s sequence, d head size.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..config.cluster import Cluster

TILE = 128  # a device multiplies whole tiles: rows and columns of a product count as the next multiple
# FlashAttention-2 on an H100: at s tokens s / (s + half) of the rate of long sequences. Its forward pass, its backward
# pass; causal besides. A causal core counts half of the scores and reaches 0.905 of the rate.
HALF_RATE_TOKENS = (70, 240)
CAUSAL_HALF_RATE_TOKENS, CAUSAL_SHARE = 230, 0.905
# Sizes that kernels are written for, with the share of the rate; of 96 and 192 assumed, between those beside them.
HEAD_SIZES = {64: 0.88, 96: 0.94, 128: 1.0, 192: 0.9, 256: 0.8}
DROPOUT_SHARE = 0.8  # of the rate with attention dropout; fitted, analysis/benchmarks/fit_roofline.py
BACKWARD_FLOPS = 1.25  # with the scores that the backward pass recomputes


@dataclass(frozen=True)
class Product:
    """Equal matrix products with results [m, n].

    Args:
        float8: the operands are float8.
    """

    m: int
    n: int
    float8: bool = False

    def seconds(self, flops: int, cluster: Cluster, dtype: str) -> float:
        """Time of the FLOPs in whole tiles."""
        tiled = flops * _in_tiles(self.m) / self.m * _in_tiles(self.n) / self.n
        return tiled / cluster.product_flops_per_s("fp8" if self.float8 else "bf16" if dtype == "fp8" else dtype)


@dataclass(frozen=True)
class Core:
    """A fused attention core, forward or backward.

    Args:
        seq_length: tokens s.
        head_size: d.
        causal: blocks above the diagonal are skipped.
        drops: attention dropout.
        backward: the backward pass, which recomputes the scores.
    """

    seq_length: int
    head_size: int
    causal: bool
    drops: bool
    backward: bool

    def seconds(self, flops: int, cluster: Cluster, dtype: str) -> float:
        """Time of the FLOPs in heads of the kernel's size.

        Source: Dao 2023 and Shah et al. 2024, Figures 5 and 6.
        """
        size = next((size for size in HEAD_SIZES if size >= self.head_size), self.head_size)
        padded = flops * size / self.head_size * (BACKWARD_FLOPS if self.backward else 1.0)
        rate = cluster.attention_flops_per_s(dtype, self.backward) * HEAD_SIZES.get(size, 0.5)
        half = HALF_RATE_TOKENS[self.backward]
        if self.causal:
            padded, rate, half = padded / 2, rate * CAUSAL_SHARE, half + CAUSAL_HALF_RATE_TOKENS
        if self.drops:
            rate *= DROPOUT_SHARE
        return padded / (rate * self.seq_length / (self.seq_length + half))


class Operation(NamedTuple):
    """A number of equal operations of one rank in one step; without `work` one pass or several over tensors.

    Args:
        name: what is computed.
        phase: `forward`, `recomputation`, `backward`, `gradients` or `optimizer`.
        read, written: bytes per operation; a tensor counts once, however often a kernel reads it.
        launches: kernel launches per operation.
        flops: of matrix products, per operation; attention counts as dense, without what its kernel recomputes.
        work: the shapes on which the time of FLOPs depends.
        count: per step.
        starts: what is sent from when the operation could begin: the operands of that message are computed by then.
        needs: what must have arrived before the operation begins.
    """

    name: str
    phase: str
    read: int
    written: int
    launches: int = 1
    flops: int = 0
    work: Product | Core | None = None
    count: int = 1
    starts: str = ""
    needs: str = ""

    @property
    def kind(self) -> str:
        """`product`, `attention`, `optimizer` or `elementwise`."""
        if self.work is None:
            return "optimizer" if self.phase == "optimizer" else "elementwise"
        return "product" if isinstance(self.work, Product) else "attention"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written per operation."""
        return self.read + self.written

    def seconds(self, cluster: Cluster, dtype: str) -> float:
        """Time of all of them without their launches: the slower of arithmetic and bytes.

        Source: Williams et al. 2009 (roofline).
        """
        share = 1.0 if isinstance(self.work, Product) else cluster.roofline.memory_share
        seconds = self.num_bytes / (cluster.roofline.copy_gb_s * 1e9 * share)
        if self.work is not None:
            seconds = max(seconds, self.work.seconds(self.flops, cluster, dtype))
        return self.count * seconds

    def launch_s(self, cluster: Cluster) -> float:
        """Time between the kernels of all of them: the place for a model of the host, which launches them."""
        return self.count * self.launches * cluster.roofline.launch_us * 1e-6


def times(number: int, operation: Operation) -> Operation:
    """The operation, `number` times as often."""
    return operation._replace(count=number * operation.count)


def product(name: str, phase: str, m: int, n: int, k: int, e: int, float8: bool = False, batch: int = 1) -> Operation:
    """`batch` matrix products in one launch, of operands of e bytes, float8 of one; the result has e."""
    read, written = batch * (1 if float8 else e) * (m * k + k * n), batch * e * m * n
    return Operation(name, phase, read, written, 1, 2 * batch * m * n * k, Product(m, n, float8))


def _in_tiles(width: int) -> int:
    return -(-width // TILE) * TILE
