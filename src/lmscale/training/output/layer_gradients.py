"""Gradient norm per part of the model."""

import re

from torch import Tensor

from ...parallel import gradient_norms_of_parts
from ..step.optimizer import MixedPrecisionAdamW

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.")


def layer_gradient_norms(optimizer: MixedPrecisionAdamW) -> dict[str, float]:
    """L2 norm of the step's gradient before clipping, per part of the model (between `reduce_gradients` and `step`).

    Communicates:
        as `gradient_norms_of_parts`.
    """
    members: dict[str, list[Tensor]] = {part_of_model(name): [] for name in optimizer.all_names}
    for name, master in zip(optimizer.names, optimizer.masters, strict=True):
        members[part_of_model(name)].append(master)
    norms = gradient_norms_of_parts(list(members.values()), optimizer.context, optimizer.device)
    scale = optimizer.counters.read().loss_scale
    return {part: norm / scale for part, norm in zip(members, norms, strict=True)}


def part_of_model(parameter_name: str) -> str:
    """`layer_<i>` for parameters of layer i, `embedding` for those before the layers, `output` for those after."""
    layer = _LAYER.match(parameter_name)
    if layer is not None:
        return f"layer_{layer[1]}"
    return "embedding" if "embedding" in parameter_name else "output"
