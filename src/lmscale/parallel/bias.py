"""Biases of linear layers, whose gradients a GPU's compiled code sums without a pass of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor


class _BiasGradient(torch.autograd.Function):
    """A result that has its bias already, unchanged; the bias gets the sum of its gradient."""

    @staticmethod
    def forward(ctx, y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, sum_rows(grad_output)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.linear` with `sum_rows` for the gradient of the bias.

    Shapes:
        x [..., in]; weight [out, in]; bias [out]; returns [..., out].
    """
    if _sums_by_sample(x):
        return _BiasGradient.apply(F.linear(x, weight, bias.detach()), bias)
    return F.linear(x, weight, bias)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias with `sum_rows` for the gradient of the bias.

    Shapes:
        x [..., out]; bias [out]; returns [..., out].
    """
    return _BiasGradient.apply(x + bias.detach(), bias) if _sums_by_sample(x) else x + bias


def sum_rows(grad: Tensor) -> Tensor:
    """The gradient of a bias, from that of its layer's output.

    In code compiled for a GPU, first over the positions of each sample, in fp32 at least, then over the samples.
    Inductor does the first sum in the kernel that computes `grad`, of GELU or dropout. A sum over all rows at once
    would be a pass of its own over `grad`, because its loops are not those of that kernel.

    Shapes:
        grad [..., out]; returns [out].
    """
    if _sums_by_sample(grad):
        wide = torch.promote_types(grad.dtype, torch.float32)
        return grad.sum(dim=1, dtype=wide).sum(dim=0).to(grad.dtype)
    return grad.flatten(0, -2).sum(dim=0)


def _sums_by_sample(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 3 and torch.compiler.is_compiling()
