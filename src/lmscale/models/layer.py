"""One transformer layer: attention and MLP, each with the LayerNorms and the residual connection of its placement."""

import torch
from torch import Tensor, nn

from ..config import TransformerConfig
from ..parallel import LayerNorm, ParallelContext, counter_dropout
from .attention import SelfAttention
from .key_value_cache import KeyValueCache
from .mlp import MLP
from .parametrization import scaled

DROPOUTS_OF_A_LAYER = 3  # attention probabilities, output of attention, output of MLP


class TransformerLayer(nn.Module):
    """Attention and MLP, each with dropout, in the norm placement of `model.norm_order` (`norm_placement.py`).

    pre (Figure 7 b):   x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))
    post (Figure 7 a):  x = norm(x + dropout(attention(x)));  x = norm(x + dropout(mlp(x)))

    Both have the same parameters. With `context.batch_halves` the layer computes the two halves of the batch one after
    the other. It computes an odd batch, which occurs only in validation, and the tokens of a generation as a whole.

    Shapes:
        x [b, s, h], with sequence parallelism [b, s/p, h]; attention_mask bool [b, 1, 1 or s, s] or None; dropout_keys
        int32 [3, b], this layer's rows of `site_keys`, with sequence parallelism the last two of `keys_of_own_tokens`,
        or None if nothing is dropped; returns the shape of x. With a cache the s tokens are appended to its rows.

    Communicates:
        over the tensor group, all-reduces of [b, s, h]: two forward (g), two backward (f); with sequence parallelism
        all-gathers and reduce-scatters in their place, see `sequence_parallel_column_linear`. In halves twice as
        many of half the size; in compiled code most of them while the other half is computed (`WaitLast`).

    Source: sections 3 and 5.3, Figure 7.
    """

    def __init__(self, config: TransformerConfig, context: ParallelContext, index: int) -> None:
        super().__init__()
        self.context, self.dropout = context, config.hidden_dropout
        self.residual_factor = config.scaling.residual_factor
        self.placement = config.placement.of_layer(index, config.num_layers)
        for sublayer, module in (("attention", SelfAttention(config, context, index)), ("mlp", MLP(config, context))):
            for name in self.placement.before + self.placement.after:
                self.add_module(f"{sublayer}_{name}", LayerNorm(config.hidden_size, config.norm_eps, context))
            self.add_module(sublayer, module)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        dropout_keys: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if self.context.batch_parts(len(x)) == 1 or cache is not None:
            return self._compute(x, attention_mask, dropout_keys, cache)
        masks = (None, None) if attention_mask is None else attention_mask.chunk(2)
        keys = (None, None) if dropout_keys is None else dropout_keys.chunk(2, dim=1)
        return torch.cat([self._compute(*half, None) for half in zip(x.chunk(2), masks, keys, strict=True)])

    def _compute(self, x: Tensor, mask: Tensor | None, keys: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        core_key, attention_key, mlp_key = (None,) * DROPOUTS_OF_A_LAYER if keys is None else keys

        def attend(x: Tensor) -> Tensor:
            return scaled(self._drop(self.attention(x, mask, core_key, cache), attention_key), self.residual_factor)

        def transform(x: Tensor) -> Tensor:
            return scaled(self._drop(self.mlp(x), mlp_key), self.residual_factor)

        return self.placement.layer(x, attend, transform, self._norms("attention"), self._norms("mlp"))

    def _norms(self, sublayer: str) -> list[nn.Module]:
        return [getattr(self, f"{sublayer}_{name}") for name in self.placement.before + self.placement.after]

    def _drop(self, x: Tensor, keys: Tensor | None) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        return counter_dropout(x, self.dropout, keys)
