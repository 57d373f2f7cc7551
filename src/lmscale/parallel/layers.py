"""Linear layers and the word embedding, cut over the tensor ranks.

Legend: b batch, s sequence, h hidden, v padded vocabulary, p tensor-parallel size. Leading dimensions are free.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .bias import add_bias, linear
from .collectives import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from .context import ParallelContext
from .fast_linear import choose_column_linear, choose_row_linear
from .replicated_layers import embedding_lookup
from .sequence_parallel import in_rank_order, reduce_scatter_to_sequence_shard
from .shard_spec import describe_parameters, parameter


class ColumnParallelLinear(nn.Module):
    """Y_i = f(X) A_i + b_i: the weight is cut by columns of A; each rank computes its own columns of the output.

    Shapes:
        weight [out/p, in] and bias [out/p] (torch stores A transposed); x [..., in], with sequence parallelism
        [b, s/p, in]; returns [..., out/p], with sequence parallelism [b, s, out/p]; out with its `padding`.

    Args:
        padding: zero columns after those of A, see `ShardSpec`.

    Communicates:
        as f: backward one all-reduce of [..., in] over the tensor group; or as `sequence_parallel_column_linear`.

    Attributes:
        implementation: replaces the plain forward pass below: overlapped communication, sequence parallelism or float8
            (`fast_linear.py`). None: the plain form.

    Source: section 3, Figure 3.
    """

    extra_repr = describe_parameters

    def __init__(
        self, in_features: int, out_features: int, context: ParallelContext, init_std: float, padding: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.implementation = choose_column_linear(context)
        shape = (out_features, in_features)
        self.weight = parameter(context, shape, shard_dim=0, init="normal", std=init_std, padding=padding)
        self.bias = parameter(context, (out_features,), shard_dim=0, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        if self.implementation is not None:
            return self.implementation(x, self.weight, self.bias, self.context)
        x = copy_to_tensor_parallel_region(x, self.context)  # f
        return linear(x, self.weight, self.bias)

    def use_float8(self) -> None:
        """Compute the matrix products in float8 from now on."""
        self.implementation = choose_column_linear(self.context, float8=True)


class RowParallelLinear(nn.Module):
    """Y = g(sum_i X_i A_i) + b: the weight is cut by rows of A; each rank starts from its own columns of the input.

    The bias is replicated and added once, after g; before g it would count p times.

    Shapes:
        weight [out, in/p], bias [out]; x [..., in/p]; returns [..., out], with sequence parallelism [b, s/p, out]; in
        with its `padding`.

    Args:
        padding: zero rows after those of A, see `ShardSpec`.

    Communicates:
        as g: forward one all-reduce of [..., out] over the tensor group; or as `reduce_scatter_to_sequence_shard`.

    Attributes:
        implementation: replaces the plain forward pass below: sequence parallelism or float8 (`fast_linear.py`). None:
            the plain form.

    Source: section 3, Figure 3.
    """

    extra_repr = describe_parameters

    def __init__(
        self, in_features: int, out_features: int, context: ParallelContext, init_std: float, padding: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.implementation = choose_row_linear(context)
        shape = (out_features, in_features)
        self.weight = parameter(context, shape, shard_dim=1, init="normal", std=init_std, padding=padding)
        self.bias = parameter(context, (out_features,), grad_is_partial=context.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if self.implementation is not None:
            return self.implementation(x, self.weight, self.bias, self.context)
        x = F.linear(x, self.weight)
        return add_bias(reduce_from_tensor_parallel_region(x, self.context), self.bias)  # g

    def use_float8(self) -> None:
        """Compute the matrix products in float8 from now on."""
        self.implementation = choose_row_linear(self.context, float8=True)


class VocabParallelEmbedding(nn.Module):
    """Word embedding cut over the vocabulary: each rank looks up its own ids, other ids give zero, and g
    adds the ranks' results.

    Shapes:
        weight [v/p, h]; tokens int64 [b, s]; returns [b, s, h], with sequence parallelism [b, s/p, h].

    Communicates:
        as g: forward one all-reduce of [b, s, h] over the tensor group; or as `reduce_scatter_to_sequence_shard`.

    Source: section 3 (input embedding).
    """

    extra_repr = describe_parameters

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, hidden_size: int, context: ParallelContext, init_std: float
    ) -> None:
        super().__init__()
        self.context = context
        shape = (padded_vocab_size, hidden_size)
        drawn = {"init": "normal", "std": init_std, "used_rows": vocab_size}
        self.weight = parameter(context, shape, shard_dim=0, role="embedding", **drawn)

    def forward(self, tokens: Tensor) -> Tensor:
        ids, elsewhere = self.context.local_ids(in_rank_order(tokens, self.context), len(self.weight))
        vectors = embedding_lookup(ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_shard(vectors, self.context)
        return reduce_from_tensor_parallel_region(vectors, self.context)  # g
