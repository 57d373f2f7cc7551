"""Linear layers and embeddings cut over the tensor ranks, and the replicated ones beside them.

Legend: b batch, s sequence, h hidden, v padded vocabulary, p tensor-parallel size. Leading dimensions are free.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import column_linear, reduce_from_tensor_parallel_region
from .context import ParallelContext
from .float8 import float8_linear
from .shard_spec import describe_parameters, parameter


class ColumnParallelLinear(nn.Module):
    """Y_i = f(X) A_i + b_i: the weight cut by columns of A, each rank making its own part of the output.

    Shapes:
        weight [out/p, in] and bias [out/p] (torch stores A transposed); x [..., in], with sequence parallelism
        [b, s/p, in]; returns [..., out/p].

    Communicates:
        as `column_linear` (f).

    Source: section 3, Figure 3.
    """

    extra_repr = describe_parameters

    def __init__(self, in_features: int, out_features: int, context: ParallelContext, init_std: float) -> None:
        super().__init__()
        self.context = context
        self.in_float8 = False  # set by `models.build_model`
        self.weight = parameter(context, (out_features, in_features), shard_dim=0, init="normal", std=init_std)
        self.bias = parameter(context, (out_features,), shard_dim=0)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.context, self.in_float8)


class RowParallelLinear(nn.Module):
    """Y = g(sum_i X_i A_i) + b: the weight cut by rows of A, each rank starting from its own part of the input.

    The bias is replicated and added once, after g; inside, it would count p times.

    Shapes:
        weight [out, in/p], bias [out]; x [..., in/p]; returns [..., out], with sequence parallelism [b, s/p, out].

    Communicates:
        as `reduce_from_tensor_parallel_region` (g).

    Source: section 3, Figure 3.
    """

    extra_repr = describe_parameters

    def __init__(self, in_features: int, out_features: int, context: ParallelContext, init_std: float) -> None:
        super().__init__()
        self.context = context
        self.in_float8 = False  # set by `models.build_model`
        self.weight = parameter(context, (out_features, in_features), shard_dim=1, init="normal", std=init_std)
        self.bias = parameter(context, (out_features,), sees_shard=context.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.multiply(x))

    def multiply(self, x: Tensor) -> Tensor:
        """This rank's partial product, [..., in/p] to [..., out]; communicates nothing."""
        return float8_linear(x, self.weight) if self.in_float8 else F.linear(x, self.weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partial products plus the bias, [..., out]; communicates as the class says."""
        return reduce_from_tensor_parallel_region(partial, self.context) + self.bias


class ReplicatedLinear(nn.Module):
    """Y = XA + b with the whole weight on every rank; communicates nothing.

    Shapes:
        weight [out, in], bias [out]; x [..., in]; returns [..., out].
    """

    extra_repr = describe_parameters

    def __init__(self, in_features: int, out_features: int, context: ParallelContext, init_std: float) -> None:
        super().__init__()
        self.weight = parameter(context, (out_features, in_features), init="normal", std=init_std)
        self.bias = parameter(context, (out_features,))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    """LayerNorm over the hidden dimension, replicated: every rank computes the same (section 3).

    Shapes:
        weight and bias [h]; x [..., h]; returns [..., h]. Statistics and the gradients' sums over rows are in fp32 for
        half types.

    Args:
        sees_shard: with sequence parallelism it works on a rank's own positions, and its gradients are partial.

    Attributes:
        kernel: what computes it from x, weight, bias and eps; `layer_norm` unless replaced (`models.build_model`).
    """

    extra_repr = describe_parameters
    kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor]

    def __init__(self, hidden_size: int, eps: float, context: ParallelContext, sees_shard: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.kernel = layer_norm
        sees_shard = sees_shard and context.sequence_parallel
        self.weight = parameter(context, (hidden_size,), init="ones", sees_shard=sees_shard)
        self.bias = parameter(context, (hidden_size,), sees_shard=sees_shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.bias, self.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch's LayerNorm over the last dimension, whose gradients are summed over the rows in fp32 at least.

    Shapes:
        x [..., h]; weight, bias [h]; returns [..., h].
    """
    if _sums_in_half(x):
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class VocabParallelEmbedding(nn.Module):
    """Word embedding cut over the vocabulary: a rank looks up its own ids, gives zero for others, and g adds.

    Shapes:
        weight [v/p, h]; tokens int64 [b, s]; returns [b, s, h], with sequence parallelism [b, s/p, h].

    Communicates:
        as `reduce_from_tensor_parallel_region` (g), of [b, s, h].

    Source: section 3 (input embedding).
    """

    extra_repr = describe_parameters

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, hidden_size: int, context: ParallelContext, init_std: float
    ) -> None:
        super().__init__()
        self.context = context
        self.first_id = context.start(padded_vocab_size)
        self.weight = parameter(
            context,
            (padded_vocab_size, hidden_size),
            shard_dim=0,
            init="normal",
            std=init_std,
            used_rows=vocab_size,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        if self.context.tp_size == 1:
            return embedding_lookup(tokens, self.weight)
        local = tokens - self.first_id
        foreign = (local < 0) | (local >= self.weight.shape[0])
        vectors = embedding_lookup(local.masked_fill(foreign, 0), self.weight)
        vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0.0)
        return reduce_from_tensor_parallel_region(vectors, self.context)


def embedding_lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table, whose gradient is summed over the tokens in fp32 at least.

    Shapes:
        tokens int64 [b, s]; weight [n, h]; returns [b, s, h].
    """
    return _WideEmbedding.apply(tokens, weight) if _sums_in_half(weight) else F.embedding(tokens, weight)


class _WideEmbedding(torch.autograd.Function):
    """Rows in the half type, their gradient summed in fp32."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[None, Tensor]:
        # Tokens that are alike are added up in fp32 side by side, then each row is written once in the half type: a
        # table of fp32 for all ids would cost more than the sums.
        ids, order = ctx.saved_tensors[0].flatten().sort(stable=True)
        group = F.pad(ids[1:] != ids[:-1], (1, 0)).cumsum(0)
        sums = torch.zeros(len(ids), grad_output.shape[-1], dtype=torch.float32, device=ids.device)
        sums.index_add_(0, group, grad_output.flatten(0, -2)[order].float())
        gradient = grad_output.new_zeros(ctx.num_rows, grad_output.shape[-1])
        gradient[ids] = sums[group].to(grad_output.dtype)
        return None, gradient


def _sums_in_half(x: Tensor) -> bool:
    """Whether torch's backward of LayerNorm and embedding would add up rows in the half type itself.

    It does on a CPU: over 16,384 rows a bias gradient is then off by 58 %. CUDA's kernels add in fp32, but of an
    embedding of up to 3,072 tokens they round every 32 tokens: up to 1 % off in bf16, by an emulation of the kernel.

    Source: pytorch, `ATen/native/cuda/Embedding.cu`, `embedding_backward_feature_kernel`.
    """
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
