"""How weights, rates and multipliers change with width and depth: one class per `model.parametrization`.

With N = hidden_size / base_hidden_size, D = num_layers / base_num_layers, d the size of a head, "inside" meaning in a
layer, and what is not named as under `standard`:

| | standard | mup | completep |
|---|---|---|---|
| initial std of a hidden matrix | std | std / sqrt(N) | std / sqrt(N) |
| its learning rate | lr | lr / N | lr / N |
| its weight decay (times the rate, so that their product stays) | w | w N | w N |
| AdamW's eps, outside and inside | eps, eps | eps / N, eps / N | eps / N, eps / (N D) |
| scores of attention | 1 / sqrt(d) | sqrt(base d) / d | sqrt(base d) / d |
| hidden states before a readout | 1 | 1 / N | 1 / N |
| output of a sublayer | 1 | 1 | 1 / D |
| layers that `scale_residual_init` counts | L | L | base L |

Embeddings, biases and LayerNorms have the standard std, rate and decay. A readout (the tied word embedding, BERT's
sentence order) too: only its input is scaled, before its bias. At the base size all three are equal bit for bit.

Torch is not imported: config reads the same classes. To add a parametrization, write a class and add it to
`PARAMETRIZATIONS`.

Source: Yang et al. 2022 (arXiv:2203.03466); Dey et al. 2025 (arXiv:2505.01618), Table 1, with alpha = 1.
"""

import dataclasses
import math
from typing import Any, ClassVar


class Standard:
    """The paper's: nothing depends on the size.

    Args:
        config: the model; its base sizes, where null, are its own.

    Attributes:
        scales_depth: whether there is a rule for the depth.
        norm_orders: the placements of LayerNorm that it was published for; None: any.
        width, depth: N and D.
        attention_factor: of the scores, beside 1 / sqrt(d).
        output_factor: of the hidden states that a readout takes.
        residual_factor: of a sublayer's output.
        residual_layers: the L of `scale_residual_init`.
    """

    scales_depth: ClassVar[bool] = False
    norm_orders: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, config: Any) -> None:
        self.width = config.hidden_size / (config.base_hidden_size or config.hidden_size)
        self.depth = config.num_layers / (config.base_num_layers or config.num_layers)
        self.attention_factor = self.output_factor = self.residual_factor = 1.0
        self.residual_layers = config.num_layers

    def std_factor(self, role: str) -> float:
        """Factor of the initial standard deviation of a tensor of this role."""
        return 1.0

    def rate_factor(self, role: str) -> float:
        """Factor of the scheduled learning rate, its floor included."""
        return 1.0

    def eps_factor(self, inside: bool) -> float:
        """Factor of AdamW's eps.

        Args:
            inside: whether the tensor is part of a layer.
        """
        return 1.0


class MuP(Standard):
    """Maximal update parametrization: the best rate stays as the width grows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attention_factor = math.sqrt((config.base_head_size or config.head_size) / config.head_size)
        self.output_factor = 1.0 / self.width

    def std_factor(self, role: str) -> float:
        """1 / sqrt(N) of a hidden matrix."""
        return 1.0 / math.sqrt(self.width) if role == "hidden" else 1.0

    def rate_factor(self, role: str) -> float:
        """1 / N of a hidden matrix."""
        return 1.0 / self.width if role == "hidden" else 1.0

    def eps_factor(self, inside: bool) -> float:
        """1 / N."""
        return 1.0 / self.width


class CompleteP(MuP):
    """muP with a depth rule: the best rate stays as width and depth grow."""

    scales_depth, norm_orders = True, ("pre",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.residual_factor = 1.0 / self.depth
        self.residual_layers = config.base_num_layers or config.num_layers

    def eps_factor(self, inside: bool) -> float:
        """1 / (N D) in a layer, 1 / N elsewhere."""
        return super().eps_factor(inside) / (self.depth if inside else 1.0)


class UnpublishedCompleteP(CompleteP):
    """CompleteP's rules at every placement, to study what they do where nobody has published one for the depth."""

    norm_orders = None


PARAMETRIZATIONS: dict[str, type[Standard]] = {
    "standard": Standard,
    "mup": MuP,
    "completep": CompleteP,
    "completep_unpublished": UnpublishedCompleteP,
}


def scaled(x: Any, factor: float) -> Any:
    """A tensor times a factor; the tensor itself where that is 1."""
    return x if factor == 1.0 else x * factor


def parametrize(module: Any, config: Any) -> None:
    """Write the factors of `config.parametrization` into the `ShardSpec` of every parameter, before weights are drawn.

    Args:
        module: its parameters were made by `parallel.parameter`.
    """
    rules = config.scaling
    for name, parameter in module.named_parameters():
        spec = parameter.shard
        role = "vector" if parameter.ndim == 1 else spec.role
        parameter.shard = dataclasses.replace(
            spec,
            std=spec.std * rules.std_factor(role),
            rate_factor=rules.rate_factor(role),
            eps_factor=rules.eps_factor(inside=".layers." in name),
        )
