"""Layers that every tensor rank holds and computes whole: a linear layer, LayerNorm, and the embedding lookup.

For half types on a CPU, LayerNorm and the lookup sum their gradients over rows in fp32 (`sums_in_half`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import ParallelContext
from .shard_spec import describe_parameters, parameter


class ReplicatedLinear(nn.Module):
    """Y = XA + b with the whole weight on every rank; communicates nothing.

    Shapes:
        weight [out, in], bias [out]; x [..., in]; returns [..., out].
    """

    extra_repr = describe_parameters

    def __init__(
        self, in_features: int, out_features: int, context: ParallelContext, init_std: float, role: str = "hidden"
    ) -> None:
        super().__init__()
        self.weight = parameter(context, (out_features, in_features), init="normal", std=init_std, role=role)
        self.bias = parameter(context, (out_features,))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    """LayerNorm over the hidden dimension, replicated: every rank computes the same (section 3).

    Shapes:
        weight and bias [h]; x [..., h]; returns [..., h]. Statistics and the gradients' sums over rows are in fp32 for
        half types.

    Args:
        grad_is_partial: with sequence parallelism it sees only this rank's tokens, so its gradients are partial.

    Attributes:
        kernel: computes it from x, weight, bias and eps; `layer_norm` unless replaced (`models.build_model`).
    """

    extra_repr = describe_parameters
    kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor]

    def __init__(self, hidden_size: int, eps: float, context: ParallelContext, grad_is_partial: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.kernel = layer_norm
        partial = grad_is_partial and context.sequence_parallel
        self.weight = parameter(context, (hidden_size,), init="ones", grad_is_partial=partial)
        self.bias = parameter(context, (hidden_size,), grad_is_partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """LayerNorm over a head's numbers, with a gain that all heads share and no bias; communicates nothing.

    A rank has some of the heads, so the gain's gradient is partial. A bias of the keys would not change the softmax.

    Shapes:
        weight [d]; x [..., d]; returns [..., d].

    Source: Dehghani et al. 2023 (arXiv:2302.05442), section 2, on queries and keys.
    """

    extra_repr = describe_parameters

    def __init__(self, head_size: int, eps: float, context: ParallelContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(context, (head_size,), init="ones", grad_is_partial=context.tp_size > 1)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, None, self.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """torch's LayerNorm over the last dimension, with gradients summed over the rows in fp32 at least.

    Shapes:
        x [..., h]; weight [h]; bias [h] or None; returns [..., h].
    """
    if sums_in_half(x):
        bias = bias if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias, eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def embedding_lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table, with the gradient summed over the tokens in fp32 at least.

    Shapes:
        tokens int64 [b, s]; weight [n, h]; returns [b, s, h].
    """
    return _WideEmbedding.apply(tokens, weight) if sums_in_half(weight) else F.embedding(tokens, weight)


class _WideEmbedding(torch.autograd.Function):
    """Rows in the half type; their gradient is summed in fp32."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[None, Tensor]:
        # Equal tokens are sorted together and added in fp32, then each row is written once in the half type. An fp32
        # table of all ids would cost more than the sums.
        ids, order = ctx.saved_tensors[0].flatten().sort(stable=True)
        group = F.pad(ids[1:] != ids[:-1], (1, 0)).cumsum(0)
        sums = torch.zeros(len(ids), grad_output.shape[-1], dtype=torch.float32, device=ids.device)
        sums.index_add_(0, group, grad_output.flatten(0, -2)[order].float())
        gradient = grad_output.new_zeros(ctx.num_rows, grad_output.shape[-1])
        gradient[ids] = sums[group].to(grad_output.dtype)
        return None, gradient


def sums_in_half(x: Tensor) -> bool:
    """Whether torch's backward of LayerNorm and embedding would add rows in the half type.

    It does on a CPU: over 16,384 rows a bias gradient is then off by 58 %. CUDA's kernels add in fp32, but for an
    embedding of up to 3,072 tokens they round every 32 tokens: up to 1 % off in bf16, by an emulation of the kernel.

    Source: pytorch, `ATen/native/cuda/Embedding.cu`, `embedding_backward_feature_kernel`.
    """
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
