"""LayerNorm placements that came after the paper's, and the table of all placements by their `model.norm_order`.

Each is written as a change of `post` (the original BERT) or `pre` (the paper's), and differs from it only by its own
idea. Torch is not imported, as in `norm_placement.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .norm_placement import NormPlacement, PostNorm, PreNorm


@dataclass(frozen=True)
class DeepNorm(PostNorm):
    """Post-norm with an enlarged residual and smaller initial weights, both by depth.

    alpha = (2 L)^(1/4) and beta = (8 L)^(-1/4), for an encoder alone as for a decoder alone. beta scales the values,
    the output projection and both matrices of the MLP, in place of 1/sqrt(2 L); queries and keys are not scaled.

    Source: Wang et al. 2022 (arXiv:2203.00555); microsoft/torchscale, `encoder.py` and `decoder.py`, whose BERT has a
    LayerNorm after the embeddings, as here. Its base is Xavier's initialization, here it is N(0, std).
    """

    residual_scale: float = 1.0

    def of_layer(self, index: int, num_layers: int) -> NormPlacement:
        """Every layer has the alpha of the model's depth."""
        return DeepNorm((2 * num_layers) ** 0.25)

    def residual(self, x: Any, sublayer: Callable, norm: Callable) -> Any:
        """norm(alpha x + sublayer(x))."""
        return norm(self.residual_scale * x + sublayer(x))

    def residual_std(self, config: Any) -> float:
        """beta std."""
        return self.value_gain(config) * config.initializer_std

    def value_gain(self, config: Any) -> float:
        """beta, or 1 without `scale_residual_init`."""
        return (8 * config.num_layers) ** -0.25 if config.scale_residual_init else 1.0


class PeriNorm(PreNorm):
    """Peri-LN, or sandwich: LayerNorm before and after each sublayer, after the embeddings and after the stack.

    Source: Kim et al. 2025 (arXiv:2502.02732), where the LayerNorm after the embeddings is optional.
    """

    after = ("output_norm",)
    after_embedding = True

    def residual(self, x: Any, sublayer: Callable, norm: Callable, output_norm: Callable) -> Any:
        """x + output_norm(sublayer(norm(x)))."""
        return x + output_norm(sublayer(norm(x)))


class BottomToTop(PostNorm):
    """B2T: post-norm with one more connection, from a layer's input to its last addition, past the inner LayerNorm.

    Source: Takase et al. 2022 (arXiv:2206.00330); takase/b2t_connection.
    """

    def mlp_branch(self, x: Any, transform: Callable) -> Callable:
        """x + mlp(y): after y = norm(x + attention(x)) comes norm(y + x + mlp(y))."""
        return lambda y: x + transform(y)


class MixNorm(PreNorm):
    """Mix-LN: post-norm in the first quarter of the layers, rounded down, and pre-norm in the others.

    No LayerNorm follows the embeddings, one follows the stack.

    Source: Li et al. 2024 (arXiv:2412.13795); pixeli99/MixLN, whose model of 12 layers has 3 in post-norm.
    """

    def of_layer(self, index: int, num_layers: int) -> NormPlacement:
        """Post-norm below a quarter of the depth."""
        return PLACEMENTS["post" if index < num_layers // 4 else "pre"]


PLACEMENTS: dict[str, NormPlacement] = {
    "pre": PreNorm(),
    "post": PostNorm(),
    "deepnorm": DeepNorm(),
    "peri": PeriNorm(),
    "b2t": BottomToTop(),
    "mix": MixNorm(),
}
