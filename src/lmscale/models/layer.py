"""One transformer layer, with LayerNorm before the sublayers or after the residual additions (Figure 7)."""

from torch import Tensor, nn

from ..config import NormOrder, TransformerConfig
from ..parallel import LayerNorm, ParallelContext, counter_dropout, first_position
from .attention import KeyValueCache, SelfAttention
from .mlp import MLP

DROPOUTS_OF_A_LAYER = 3  # attention probabilities, output of attention, output of MLP


class TransformerLayer(nn.Module):
    """Attention and MLP, each with dropout and a residual connection.

    pre (Figure 7 b):   x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))
    post (Figure 7 a):  x = norm(x + dropout(attention(x)));  x = norm(x + dropout(mlp(x)))

    The parameters are the same in both orders. Each layer has three dropouts of its own.

    Shapes:
        x [b, s, h], with sequence parallelism [b, s/p, h]; attention_mask bool [b, 1, 1, s] or None; dropout_keys int32
        [3, b], this layer's rows of `site_keys`, needed in training when a counter mask is drawn; returns the shape of
        x. With a cache the s tokens go on its rows.

    Communicates:
        over the tensor group, all-reduces of [b, s, h]: two forward (g), two backward (f); with sequence parallelism
        all-gathers and reduce-scatters in their place, see `sequence_parallel_column_linear`.

    Source: sections 3 and 5.3, Figure 7.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext, index: int) -> None:
        super().__init__()
        self.context = context
        self.pre_norm = config.norm_order is NormOrder.PRE
        self.dropout = config.hidden_dropout
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_eps, context)
        self.attention = SelfAttention(config, context, layer=index)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps, context)
        self.mlp = MLP(config, context)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        dropout_keys: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        of_core, of_attention, of_mlp = (None,) * DROPOUTS_OF_A_LAYER if dropout_keys is None else dropout_keys
        if self.pre_norm:
            attended = self.attention(self.attention_norm(x), attention_mask, of_core, cache)
            x = x + self._drop(attended, of_attention)
            return x + self._drop(self.mlp(self.mlp_norm(x)), of_mlp)
        attended = self.attention(x, attention_mask, of_core, cache)
        x = self.attention_norm(x + self._drop(attended, of_attention))
        return self.mlp_norm(x + self._drop(self.mlp(x), of_mlp))

    def _drop(self, x: Tensor, keys: Tensor | None) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        return counter_dropout(x, self.dropout, keys, first_position(x, self.context))
