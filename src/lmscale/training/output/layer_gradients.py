"""The gradient's norm by part of the model."""

import re

from torch import Tensor

from ...parallel import gradient_norms_of_parts
from ..step.optimizer import MixedPrecisionAdamW

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.")


def layer_gradient_norms(optimizer: MixedPrecisionAdamW) -> dict[str, float]:
    """L2 norm of the step's gradient before clipping, by part of the model; between `reduce_gradients` and `step`.

    Communicates:
        what `gradient_norms_of_parts` says.
    """
    members: dict[str, list[Tensor]] = {part_of_model(name): [] for name in optimizer.all_names}
    for name, master in zip(optimizer.names, optimizer.masters, strict=True):
        members[part_of_model(name)].append(master)
    norms = gradient_norms_of_parts(list(members.values()), optimizer.context, optimizer.device)
    return {part: norm / optimizer.loss_scale.value for part, norm in zip(members, norms, strict=True)}


def part_of_model(parameter_name: str) -> str:
    """`layer_<i>` for what belongs to layer i, `embedding` for what is before the layers, `output` for what follows."""
    layer = _LAYER.match(parameter_name)
    if layer is not None:
        return f"layer_{layer[1]}"
    return "embedding" if "embedding" in parameter_name else "output"
