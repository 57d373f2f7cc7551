"""One transformer layer, with LayerNorm before the sublayers or after the residual additions (Figure 7)."""

from torch import Tensor, nn

from ..config import NormOrder, TransformerConfig
from ..parallel import LayerNorm, ParallelContext, counter_dropout, first_position
from .attention import KeyValueCache, SelfAttention
from .mlp import MLP

EMBEDDING_DROPOUT_SITE = 0


class TransformerLayer(nn.Module):
    """Attention and MLP, each with dropout and a residual connection.

    pre (Figure 7 b):   x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))
    post (Figure 7 a):  x = norm(x + dropout(attention(x)));  x = norm(x + dropout(mlp(x)))

    The parameters are the same in both orders. Each layer has three dropout sites of its own.

    Shapes:
        x [b, s, h], with sequence parallelism [b, s/p, h]; attention_mask bool [b, 1, 1, s] or None; sample_keys int32
        [b], needed in training when a counter mask is drawn; returns the shape of x. With a cache the s tokens go on
        its rows.

    Communicates:
        over the tensor group, all-reduces of [b, s, h]: two forward (g), two backward (f); with sequence parallelism
        all-gathers and reduce-scatters in their place, see `column_linear`.

    Source: sections 3 and 5.3, Figure 7.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext, index: int) -> None:
        super().__init__()
        self.context = context
        self.pre_norm = config.norm_order is NormOrder.PRE
        self.dropout = config.hidden_dropout
        first_site = EMBEDDING_DROPOUT_SITE + 1 + 3 * index
        self.attention_site, self.mlp_site = first_site + 1, first_site + 2
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_eps, context)
        self.attention = SelfAttention(config, context, dropout_site=first_site, layer=index)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps, context)
        self.mlp = MLP(config, context)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        sample_keys: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if self.pre_norm:
            attended = self.attention(self.attention_norm(x), attention_mask, sample_keys, cache)
            x = x + self._drop(attended, sample_keys, self.attention_site)
            return x + self._drop(self.mlp(self.mlp_norm(x)), sample_keys, self.mlp_site)
        attended = self.attention(x, attention_mask, sample_keys, cache)
        x = self.attention_norm(x + self._drop(attended, sample_keys, self.attention_site))
        return self.mlp_norm(x + self._drop(self.mlp(x), sample_keys, self.mlp_site))

    def _drop(self, x: Tensor, sample_keys: Tensor | None, site: int) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        return counter_dropout(x, self.dropout, sample_keys, site, first_position(x, self.context))
