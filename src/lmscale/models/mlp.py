"""The two-layer MLP with GELU, its first weight cut by columns and its second by rows."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import TransformerConfig
from ..parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear


class MLP(nn.Module):
    """h -> 4h -> GELU -> h; nothing is communicated between the two layers: the GELU acts on the rank's columns.

    Shapes:
        x [b, s, h], with sequence parallelism [b, s/p, h]; returns the shape of x, before dropout; the inner
        activations are [b, s, 4h/p].

    Communicates:
        forward one all-reduce of [b, s, h] (g), backward one (f), over the tensor group; with sequence parallelism see
        `sequence_parallel_column_linear`.

    Source: section 3, Figure 3 a.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext) -> None:
        super().__init__()
        self.gelu_approximation = "tanh" if config.gelu_form == "tanh" else "none"
        self.recompute_gelu = config.recompute == "selective"
        placement, h, f = config.placement, config.hidden_size, config.ffn_size
        self.up = ColumnParallelLinear(h, f, context, placement.value_gain(config) * config.initializer_std)
        self.down = RowParallelLinear(f, h, context, placement.residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)  # [b, s, 4h/p]
        if self.recompute_gelu and self.training:
            # The linear layer is inside so that its input, the GELU's output, is not kept. The recomputation stops as
            # soon as it has that input again: neither the product nor g's all-reduce is repeated.
            return checkpoint(self._gelu_and_down, inner, use_reentrant=False, preserve_rng_state=False)
        return self._gelu_and_down(inner)

    def _gelu_and_down(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(x, approximate=self.gelu_approximation))
