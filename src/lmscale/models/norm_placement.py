"""Where LayerNorms and residual connections stand (Figure 7): one class for each `model.norm_order`.

Torch is not imported, so that config and planner read the same classes. A new placement is a class here and its name in
`PLACEMENTS`.
"""

import math
from collections.abc import Callable
from typing import Any


class NormPlacement:
    """Placement of the LayerNorms around the sublayers, attention and MLP.

    Attributes:
        before, after: names of the LayerNorms in front of a sublayer's input and behind its output, or behind the
            addition; in the layer `attention_` or `mlp_` comes before them.
        after_embedding, after_stack: whether a LayerNorm follows the embeddings (`embedding_norm`), the last layer
            (`final_norm`).
        eps: LayerNorm's epsilon where `model.layer_norm_eps` is null.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    after_embedding: bool = False
    after_stack: bool = False
    eps: float = 1e-5

    def residual(self, x: Any, sublayer: Callable, *norms: Callable) -> Any:
        """The sublayer with its residual connection and its LayerNorms, `before` and then `after`.

        Shapes:
            x [b, s, h], with sequence parallelism [b, s/p, h]; so is what every function takes and returns.
        """
        raise NotImplementedError

    def residual_std(self, config: Any) -> float:
        """Standard deviation of the initial weights that end a sublayer: by 1/sqrt(2 L) smaller (section 4.2)."""
        std = config.initializer_std
        return std / math.sqrt(2 * config.num_layers) if config.scale_residual_init else std

    @property
    def num_layer_norms(self) -> int:
        """LayerNorms of one layer."""
        return 2 * len(self.before + self.after)

    @property
    def num_outer_norms(self) -> int:
        """LayerNorms outside the layers."""
        return self.after_embedding + self.after_stack


class PreNorm(NormPlacement):
    """The paper's rearrangement (Figure 7 b): LayerNorm at the input of each sublayer, and one after the stack."""

    before = ("norm",)
    after_stack = True

    def residual(self, x: Any, sublayer: Callable, norm: Callable) -> Any:
        """x + sublayer(norm(x))."""
        return x + sublayer(norm(x))


class PostNorm(NormPlacement):
    """The original BERT (Figure 7 a): LayerNorm after each residual addition and after the embeddings."""

    after = ("norm",)
    after_embedding = True
    eps = 1e-12

    def residual(self, x: Any, sublayer: Callable, norm: Callable) -> Any:
        """norm(x + sublayer(x))."""
        return norm(x + sublayer(x))


PLACEMENTS: dict[str, NormPlacement] = {"pre": PreNorm(), "post": PostNorm()}
