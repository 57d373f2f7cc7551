"""One kind of operation of a training step, with its counts."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """Equal matrix products [m, k] x [k, n].

    Args:
        float8: the operands are float8.
        batch: number of products in one launch.
    """

    m: int
    n: int
    k: int
    float8: bool = False
    batch: int = 1


@dataclass(frozen=True)
class Core:
    """A fused attention core, forward or backward.

    Args:
        batch_heads: b n / p.
        seq_length: tokens s.
        head_size: d.
        causal: blocks above the diagonal are skipped.
        drops: attention dropout.
        backward: the backward pass, which recomputes the scores.
    """

    batch_heads: int
    seq_length: int
    head_size: int
    causal: bool
    drops: bool
    backward: bool


@dataclass(frozen=True)
class Operation:
    """A number of equal operations of one rank in one step.

    Args:
        name: what is computed.
        phase: `forward`, `recomputation`, `backward`, `gradients` or `optimizer`.
        kind: `product`, `attention`, `elementwise` or `optimizer`.
        count: per step.
        launches: kernel launches per operation.
        flops: of matrix products, per operation; attention counts as dense, without what its kernel recomputes.
        read, written: bytes per operation; a tensor counts once, however often a kernel reads it.
        work: the shapes that its time depends on besides bytes.
    """

    name: str
    phase: str
    kind: str
    count: int
    launches: int
    flops: int
    read: int
    written: int
    work: Product | Core | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes read and written per operation."""
        return self.read + self.written


def times(number: int, operation: Operation) -> Operation:
    """The operation, `number` times as often."""
    return dataclasses.replace(operation, count=number * operation.count)


def elementwise(name: str, phase: str, read: int, written: int, launches: int = 1) -> Operation:
    """An operation without products, or several in sequence."""
    return Operation(name, phase, "elementwise", 1, launches, 0, read, written)


def product(
    name: str, phase: str, m: int, n: int, k: int, e: int, float8: bool = False, batch: int = 1, launches: int = 1
) -> Operation:
    """A matrix product of operands of e bytes, float8 of one; the result has e."""
    each = 1 if float8 else e
    read, written = batch * each * (m * k + k * n), batch * e * m * n
    flops = 2 * batch * m * n * k
    return Operation(name, phase, "product", 1, launches, flops, read, written, Product(m, n, k, float8, batch))
