"""The tensors that a model has, by its configuration."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..config import TransformerConfig
from ..models import build_model
from ..parallel import ParallelContext
from .errors import CheckpointError

_FIRST_LAYER = "transformer.layers.0."
Shape = tuple[tuple[int, ...], int | None]  # the full shape, and the shard dimension or None


def meta_model(config: TransformerConfig) -> nn.Module:
    """The model with its heads of pretraining on the meta device."""
    return build_model(config, ParallelContext(), seed=None, device="meta")


def model_shapes(
    config: TransformerConfig, build: Callable[[TransformerConfig], nn.Module] = meta_model
) -> dict[str, Shape]:
    """Full shape and shard dimension of every parameter by name; only one layer is built, on the meta device.

    Raises:
        CheckpointError: a tensor would have more bytes than 64 bits count.
    """
    try:
        model = build(replace(config, num_layers=1))
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the model's sizes must be ones that torch can count, but: {reason}") from None
    shapes = {}
    for name, param in model.named_parameters():
        for index in range(config.num_layers if name.startswith(_FIRST_LAYER) else 1):
            full_name = name.replace(_FIRST_LAYER, f"transformer.layers.{index}.")
            shapes[full_name] = tuple(param.shard.full_shape), param.shard.shard_dim
    return shapes
