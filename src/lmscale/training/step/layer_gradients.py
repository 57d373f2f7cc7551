"""Gradient norm per part of the model."""

import re
from collections.abc import Callable

from torch import Tensor

from ...parallel import gradient_norms_of_parts
from .optimizer import MixedPrecisionAdamW

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.")


def part_of_model(parameter_name: str) -> str:
    """`layer_<i>` for parameters of layer i, `embedding` for those before the layers, `output` for those after."""
    layer = _LAYER.match(parameter_name)
    if layer is not None:
        return f"layer_{layer[1]}"
    return "embedding" if "embedding" in parameter_name else "output"


def layer_gradient_norms(
    optimizer: MixedPrecisionAdamW, part_of: Callable[[str], str] = part_of_model
) -> dict[str, float]:
    """L2 norm of the step's gradient before clipping, per part of the model (between `reduce_gradients` and `step`).

    Args:
        part_of: the part that a parameter belongs to, by its name.

    Communicates:
        as `gradient_norms_of_parts`.
    """
    members: dict[str, list[Tensor]] = {part_of(name): [] for name in optimizer.all_names}
    for name, master in zip(optimizer.names, optimizer.masters, strict=True):
        members[part_of(name)].append(master)
    norms = gradient_norms_of_parts(list(members.values()), optimizer.context, optimizer.device)
    scale = optimizer.counters.read().loss_scale
    return {part: norm / scale for part, norm in zip(members, norms, strict=True)}
