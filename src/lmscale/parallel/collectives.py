"""The conjugate operators f and g of the paper's Figure 3, here around an MLP on two ranks.

              +--> X A_1 --> GeLU --> Y_1 B_1 --+   rank 0
    X --> f --|                                 |--> g --> Z
              +--> X A_2 --> GeLU --> Y_2 B_2 --+   rank 1

              A = [A_1, A_2]     B = [B_1; B_2]

         forward       backward
    f    identity      all-reduce
    g    all-reduce    identity

Between f and g is the parallel region: each rank works on its own columns of A and its own rows of B. Outside it all
ranks hold the same X and Z. Around attention f and g stand the same way (Figure 3 b), so a transformer layer costs two
all-reduces in the forward pass and two in the backward pass.
"""

import torch
from torch import Tensor

from .context import ParallelContext


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.context.tp_communicator.all_reduce(grad_output), None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor, context: ParallelContext) -> Tensor:
        return context.tp_communicator.all_reduce(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def copy_to_tensor_parallel_region(x: Tensor, context: ParallelContext) -> Tensor:
    """f: enter the parallel region, where each rank works on its own columns from the same input.

    Shapes:
        x [..., h], equal on all tensor ranks; returned unchanged.

    Communicates:
        forward nothing; backward one all-reduce (sum) of the gradient [..., h] over the tensor group.

    Source: section 3, Figure 3.
    """
    return _CopyToTensorParallelRegion.apply(x, context)


def reduce_from_tensor_parallel_region(x: Tensor, context: ParallelContext) -> Tensor:
    """g: leave the parallel region by adding the partial results of all ranks.

    Shapes:
        x [..., h], this rank's partial sum; returns the total [..., h], equal on all tensor ranks.

    Communicates:
        forward one all-reduce (sum) of [..., h] over the tensor group; backward nothing.

    Source: section 3, Figure 3.
    """
    return _ReduceFromTensorParallelRegion.apply(x, context)
