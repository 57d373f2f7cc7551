"""The tensors that a model has, by its configuration, and those that a checkpoint of it must have."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from ..config import TransformerConfig
from ..config.checks import list_some
from ..models import build_model
from ..parallel import ParallelContext
from .errors import CheckpointError
from .metadata import METADATA, CheckpointMetadata, latest_checkpoint, read_metadata
from .read import find_damage

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


def config_of(path: Path, metadata: CheckpointMetadata, needs_heads: bool = True) -> TransformerConfig:
    """The model's configuration, once the checkpoint's tensors are known to be those of that model.

    Of a finetuned checkpoint, and without `needs_heads`, the encoder must be complete, and the model's heads may be
    missing. A finetuned one has its task's head instead, a linear layer of the model's width.

    Raises:
        CheckpointError: the configuration is invalid; a tensor is missing, unknown, or has a different shape or shard
            dimension than the model's.
    """
    try:
        config = TransformerConfig.from_dict(metadata.model)
        # Before the names are listed: a wrong `num_layers` may be a billion.
        if config.num_layers > len(metadata.tensors):
            raise ValueError(
                f"`num_layers` must be at most its {len(metadata.tensors)} tensors, but is {config.num_layers}"
            )
        shapes = model_shapes(config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path.name}: {METADATA} has an invalid model ({error})") from None
    weights = {key.removeprefix("model/") for key in metadata.tensors if key.startswith("model/")}
    if "finetune" in metadata.state or not needs_heads:
        kept = {"transformer"} | {name.split(".")[0] for name in weights}
        shapes = {name: shape for name, shape in shapes.items() if name.split(".")[0] in kept}
    if "finetune" in metadata.state:
        bias = metadata.tensors.get("model/head.bias")
        outputs = bias.shape[:1] if bias else ()  # how many there are, the task says
        shapes |= {"head.weight": ((*outputs, config.hidden_size), None), "head.bias": (outputs, None)}
    has_moments = metadata.optimizer.get("num_updates")  # a checkpoint before the first update has none
    kinds = ("model", "exp_avg", "exp_avg_sq") if has_moments else ("model",)
    expected = {f"{kind}/{name}" for kind in kinds for name in shapes}
    for problem, keys in (
        ("lacks", expected - metadata.tensors.keys()),
        ("is of a model without", metadata.tensors.keys() - expected),
    ):
        if keys:
            raise CheckpointError(f"checkpoint {path.name} {problem} {list_some(sorted(keys))}")
    for key, entry in metadata.tensors.items():
        shape, shard_dim = shapes[key.split("/", 1)[1]]
        if (entry.shape, entry.shard_dim) != (shape, shard_dim):
            raise CheckpointError(
                f"checkpoint {path.name}: {key} must be {shape}, sharded along {shard_dim}, "
                f"but is {entry.shape}, sharded along {entry.shard_dim}"
            )
    return config


def check_shapes(path: str | Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has the parameters with these full shapes, and no others.

    A reader would take the first rows of a longer one for the shard of one of several ranks.

    Raises:
        CheckpointError: it has not.
    """
    saved = read_metadata(path).tensors.items()
    there = {key.removeprefix("model/"): tuple(entry.shape) for key, entry in saved if key.startswith("model/")}
    for name in sorted(shapes.keys() | there.keys()):
        if shapes.get(name) != there.get(name):
            raise CheckpointError(
                f"checkpoint {Path(path).name} is of another model: the shape of {name} is {shapes.get(name)} here and "
                f"{there.get(name)} there"
            )


def open_source(
    path: str | Path, needs_heads: bool = True, share: int = 0, num_shares: int = 1
) -> tuple[Path, CheckpointMetadata, TransformerConfig]:
    """Find and verify the checkpoint at `path`; returns its path, metadata and model configuration.

    Args:
        needs_heads: the model's heads must be complete too.
        share, num_shares: of the files whose content is verified; see `find_damage`.

    Raises:
        CheckpointError: it is not a checkpoint, is damaged, or its tensors are not those of its model.
    """
    path = latest_checkpoint(path)
    metadata = read_metadata(path)
    damage = find_damage(path, metadata, share, num_shares)
    if damage is not None:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {damage}")
    return path, metadata, config_of(path, metadata, needs_heads)
