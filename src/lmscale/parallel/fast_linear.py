"""Faster forms of `ColumnParallelLinear` and `RowParallelLinear`, which choose theirs here.

`tests/parallel/test_layers.py` holds them equal to the plain forms in `layers.py`. What differs:
- tp_size > 1: f's all-reduce runs while the weight's gradient is computed.
- Sequence parallelism: an all-gather and a reduce-scatter replace f's all-reduce, and only this rank's tokens of the
  input are kept for the backward pass.
- float8: the operands of the products are rounded (`float8.py`), which changes results within the error of float8.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .bias import add_bias, sum_rows
from .collectives import reduce_from_tensor_parallel_region
from .context import ParallelContext
from .float8 import Float8Products, float8_linear
from .sequence_parallel import gather_tokens, reduce_scatter_to_sequence_shard

Linear = Callable[[Tensor, Tensor, Tensor, ParallelContext], Tensor]  # x, weight, bias, context


def choose_column_linear(context: ParallelContext, float8: bool = False) -> Linear | None:
    """The faster form of a column-parallel linear layer; None if the plain one is as fast."""
    if context.tp_size == 1 and not float8:
        return None
    linear = sequence_parallel_column_linear if context.sequence_parallel else overlapped_column_linear
    return partial(linear, products=Float8Products if float8 else FullProducts)


def choose_row_linear(context: ParallelContext, float8: bool = False) -> Linear | None:
    """The faster form of a row-parallel linear layer; None if the plain one is as fast."""
    if not context.sequence_parallel and not float8:
        return None
    return partial(row_linear, product=float8_linear if float8 else F.linear)


class FullProducts:
    """The three matrix products of a linear layer in the type of the operands; `Float8Products` has the same names."""

    linear = staticmethod(F.linear)

    @staticmethod
    def prepare_gradient(rows: Tensor) -> Tensor:
        return rows

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    @staticmethod
    def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
        return grad.t() @ x


class _OverlappedColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, context: ParallelContext, products: type) -> Tensor:
        ctx.context, ctx.products = context, products
        ctx.save_for_backward(x, weight)
        return products.linear(gather_tokens(x, context), weight, bias)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        rows = grad_output.flatten(0, -2)
        grad = ctx.products.prepare_gradient(rows)
        partial_d_x = ctx.products.input_gradient(grad, weight)
        wait = ctx.context.tp_communicator.begin_all_reduce(partial_d_x.unflatten(0, grad_output.shape[:-1]))
        del partial_d_x  # the communicator may have made a copy
        d_weight = ctx.products.weight_gradient(grad, x.flatten(0, -2))
        d_bias = sum_rows(grad_output)
        return wait(), d_weight, d_bias, None, None


class _SequenceParallelColumnLinear(_OverlappedColumnLinear):
    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        communicator = ctx.context.tp_communicator
        if torch.compiler.is_compiling():
            # The compiler merges equal collectives: it would keep the forward pass's [b, s, in] instead of x. This
            # copy of x depends on the gradient, so its collective cannot be merged with one of the forward pass.
            x = torch.where(grad_output.flatten()[0] == 0, x, x)
        wait_for_x = communicator.begin_all_gather(x.flatten(0, -2))
        rows = grad_output.flatten(0, -2)
        grad = ctx.products.prepare_gradient(rows)
        wait_for_d_x = communicator.begin_reduce_scatter(ctx.products.input_gradient(grad, weight))
        d_weight = ctx.products.weight_gradient(grad, wait_for_x())
        d_bias = sum_rows(grad_output)
        return wait_for_d_x().view_as(x), d_weight, d_bias, None, None


def overlapped_column_linear(
    x: Tensor, weight: Tensor, bias: Tensor, context: ParallelContext, products: type = FullProducts
) -> Tensor:
    """f and the linear layer after it; f's all-reduce overlaps the computation of the weight's gradient.

    Shapes:
        x [..., in], equal on all tensor ranks; weight [out/p, in]; bias [out/p]; returns [..., out/p].

    Args:
        products: `FullProducts` or `Float8Products`; what is communicated keeps its type.

    Communicates:
        over the tensor group, forward nothing; backward one all-reduce of [..., in] during the weight's gradient.

    Source: section 3, Figure 3.
    """
    return _OverlappedColumnLinear.apply(x, weight, bias, context, products)


def sequence_parallel_column_linear(
    x: Tensor, weight: Tensor, bias: Tensor, context: ParallelContext, products: type = FullProducts
) -> Tensor:
    """f of sequence parallelism and the linear layer after it.

    Shapes:
        x [b, s/p, in], this rank's tokens; weight [out/p, in]; bias [out/p]; returns [b, s, out/p].

    Args:
        products: `FullProducts` or `Float8Products`; what is communicated keeps its type.

    Communicates:
        over the tensor group, forward one all-gather of [b, s, in]; backward another one during the input's gradient,
        and one reduce-scatter of [b, s, in] during the weight's.

    Source: Korthikanti et al. 2022, section 4.2.2.
    """
    return _SequenceParallelColumnLinear.apply(x, weight, bias, context, products)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    context: ParallelContext,
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """A linear layer, then g (with sequence parallelism a reduce-scatter), then the bias.

    Shapes:
        x [..., in/p]; weight [out, in/p]; bias [out]; returns [..., out], with sequence parallelism [b, s/p, out].

    Args:
        product: `F.linear` or `float8_linear`.

    Communicates:
        over the tensor group, forward one all-reduce (g); or as `reduce_scatter_to_sequence_shard`.
    """
    reduce = reduce_scatter_to_sequence_shard if context.sequence_parallel else reduce_from_tensor_parallel_region
    y = reduce(product(x, weight), context)
    if product is float8_linear:  # whose backward pass sums the rows where it finds the largest magnitude
        return y + bias
    return add_bias(y, bias)
