"""Where LayerNorms and residual connections stand (Figure 7): one class per `model.norm_order`.

Torch is not imported: config and planner read the same classes. `later_placements.py` has those that came after the
paper, and the names of all. To add a placement, write a class and add an instance to `PLACEMENTS` there. Most define
`residual`; override `layer` if connections cross sublayers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class NormPlacement(ABC):
    """Placement of the LayerNorms around the sublayers, attention and MLP.

    Attributes:
        before, after: names of the LayerNorms before a sublayer, and of those after it or after the addition; the layer
            prefixes them with `attention_` or `mlp_`.
        after_embedding, after_stack: whether a LayerNorm follows the embeddings (`embedding_norm`) or the last layer
            (`final_norm`).
        eps: LayerNorm's epsilon if `model.layer_norm_eps` is null.
        residual_scale: factor of the residual, to which a sublayer's output is added.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    after_embedding: bool = False
    after_stack: bool = False
    eps: float = 1e-5
    residual_scale: float = 1.0

    def of_layer(self, index: int, num_layers: int) -> "NormPlacement":
        """The placement of one layer, counted from 0; the same in every layer unless a subclass says otherwise."""
        return self

    def layer(
        self,
        x: Any,
        attend: Callable,
        transform: Callable,
        attention_norms: list[Callable],
        mlp_norms: list[Callable],
    ) -> Any:
        """One transformer layer: attention, then the MLP, each with its residual connection and LayerNorms.

        Shapes:
            x [b, s, h], with sequence parallelism [b, s/p, h]; so is what every function takes and returns.

        Args:
            attend, transform: attention and MLP, each with its dropout.
            attention_norms, mlp_norms: the LayerNorms of each, in the order of `before` and `after`.
        """
        y = self.residual(x, attend, *attention_norms)
        return self.residual(y, self.mlp_branch(x, transform), *mlp_norms)

    def mlp_branch(self, x: Any, transform: Callable) -> Callable:
        """What the second residual connection adds to its input: the MLP; `x` is the input of the layer."""
        return transform

    @abstractmethod
    def residual(self, x: Any, sublayer: Callable, *norms: Callable) -> Any:
        """The sublayer with its residual connection and its LayerNorms, `before` and then `after`.

        Shapes:
            x [b, s, h], with sequence parallelism [b, s/p, h]; so is what every function takes and returns.
        """

    def residual_std(self, config: Any) -> float:
        """Initial standard deviation of the last matrix of a sublayer, scaled by 1/sqrt(2 L) (section 4.2)."""
        std = config.initializer_std
        return std / math.sqrt(2 * config.scaling.residual_layers) if config.scale_residual_init else std

    def value_gain(self, config: Any) -> float:
        """Factor on the initial standard deviation of the values' projection and of the MLP's first matrix."""
        return 1.0

    @property
    def num_layer_norms(self) -> int:
        """Number of LayerNorms per layer."""
        return 2 * len(self.before + self.after)


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
