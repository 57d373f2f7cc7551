"""Matrix products in float8 with one scale per tensor, computed from the tensor when it is used.

Activations and weights are e4m3 (3 bits of mantissa, up to 448), gradients are e5m2 (2 bits, up to 57,344). A tensor is
multiplied by (largest number of its type) / (largest magnitude of the tensor) and rounded; the product is divided
again. Products accumulate in fp32; results have the type of the weight.

Legend: n rows, i and o the features of a linear.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST_MAGNITUDE = 1e-12  # a tensor of zeros has no scale


class Scaled(NamedTuple):
    """A matrix in float8 and the factor (one fp32 number) that its elements must be multiplied by."""

    data: Tensor
    factor: Tensor


def to_float8(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Round a matrix to float8, scaled so that its largest magnitude becomes the largest number of the type.

    If an element is not finite, all products of the matrix are nan, and the optimizer skips the step.
    """
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=_LEAST_MAGNITUDE)
    # Rounding in fp32 could pass the largest number by its last bit, and e4m3 has no infinity to go to.
    data = (x.float() * scale).clamp(-largest, largest).to(dtype, memory_format=torch.contiguous_format)
    return Scaled(data, scale.reciprocal())


class Float8Products:
    """The three matrix products of a linear layer in float8, with the names of `fast_linear.FullProducts`."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x A + b, with x [..., i] and weight [o, i] rounded to e4m3; returns [..., o] in the type of the weight."""
        rows, matrix = to_float8(x.flatten(0, -2), FORWARD), to_float8(weight, FORWARD)
        product = _multiply(rows.data, rows.factor, matrix.data.t(), matrix.factor, weight.dtype)
        return (product if bias is None else product + bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def prepare_gradient(rows: Tensor) -> Scaled:
        """The gradient of the result, [n, o], rounded to e5m2 once for the two products below."""
        return to_float8(rows, GRADIENT)

    @staticmethod
    def input_gradient(grad: Scaled, weight: Tensor) -> Tensor:
        """Gradient [n, i] of x, from that of the result [n, o] and the weight [o, i]."""
        matrix = to_float8(weight, FORWARD)
        return _multiply(grad.data, grad.factor, _by_columns(matrix.data), matrix.factor, weight.dtype)

    @staticmethod
    def weight_gradient(grad: Scaled, x: Tensor) -> Tensor:
        """Gradient [o, i] of the weight, from that of the result [n, o] and x [n, i]."""
        rows = to_float8(x, FORWARD)
        return _multiply(grad.data.t().contiguous(), grad.factor, _by_columns(rows.data), rows.factor, x.dtype)


def _by_columns(matrix: Tensor) -> Tensor:
    """The same matrix in column-major order, the only layout a GPU accepts for the second operand."""
    return matrix.t().contiguous().t()


def _multiply(a: Tensor, a_factor: Tensor, b: Tensor, b_factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Forward products may accumulate in the tensor core's short registers; gradients have few bits to spare.
    fast = a.dtype == b.dtype
    return torch._scaled_mm(a, b, scale_a=a_factor, scale_b=b_factor, out_dtype=dtype, use_fast_accum=fast)


class _Float8Linear(torch.autograd.Function):
    """Keeps x and weight unrounded: they exist anyway, and rounding them again costs one pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return Float8Products.linear(x, weight)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = Float8Products.prepare_gradient(grad_output.flatten(0, -2))
        d_x = Float8Products.input_gradient(grad, weight).view_as(x)
        return d_x, Float8Products.weight_gradient(grad, x.flatten(0, -2))


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear without a bias, its three products in float8; communicates nothing.

    Each tensor rank scales by its own shard of a cut weight or input. The ranks do not agree on a scale, so another
    tp_size rounds differently, within the error of float8 itself.

    Shapes:
        x [..., i] and weight [o, i] of one type, bf16 in training; returns [..., o]. On a GPU i, o and the
        number of rows must be multiples of 16.

    Source: Micikevicius et al. 2022 (the two types and their use); dynamic scaling per tensor as in torchao's float8.
    """
    return _Float8Linear.apply(x, weight)
