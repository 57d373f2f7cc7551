"""The one door to optional kernels: which LayerNorm computes, beside torch's own NVIDIA's apex, and what was chosen.

apex is never needed and never taken in silence: a run that asks for it and cannot have it is refused.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kernels:
    """What computes a model's layers.

    Args:
        layer_norm: `torch` or `apex`.
        float8: the products of the layers' linears, forward and backward, are in float8.
    """

    layer_norm: str = "torch"
    float8: bool = False

    def describe(self) -> str:
        """The choice in a few words, for the first lines of a run."""
        return f"LayerNorm by {self.layer_norm}" + (", the layers' linears in float8" if self.float8 else "")


PLAIN = Kernels()


def choose_kernels(kernels: str, on_gpu: bool, float8: bool = False) -> Kernels:
    """What `kernels=` means on this machine; `auto` is apex on a GPU where it is installed, torch otherwise.

    Raises:
        ValueError: `apex` where NVIDIA's is not there, with what is there instead, or on a CPU.
    """
    problem = apex_problem() if kernels != "torch" else None
    if kernels == "apex":
        if problem is not None:
            raise ValueError(f"`kernels` must be torch or auto here, because {problem}, but is apex")
        if not on_gpu:
            raise ValueError("`kernels` must be torch or auto on a CPU, for which apex has none, but is apex")
    uses_apex = kernels != "torch" and on_gpu and problem is None
    return Kernels("apex" if uses_apex else "torch", float8)


def apex_problem() -> str | None:
    """Why NVIDIA's apex cannot be used, or None; imports nothing, as the wrong package could do anything."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "apex is not installed (NVIDIA's is conda-forge's nvidia-apex; PyPI's apex is another project)"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "normalization" / "fused_layer_norm.py").is_file() for folder in folders):
        return f"the apex at {spec.origin or folders} is PyPI's web package, not NVIDIA's (conda-forge's nvidia-apex)"
    if importlib.util.find_spec("fused_layer_norm_cuda") is None:
        return "NVIDIA's apex is installed without its CUDA extensions (conda-forge's nvidia-apex has them)"
    return None


def layer_norm_of(kernels: Kernels) -> Callable[..., Any] | None:
    """apex's LayerNorm as `(x, weight, bias, eps) -> y`, or None for torch's.

    Statistics and gradient sums are fp32 for half types, as in torch's kernel for a GPU.

    Source: NVIDIA/apex, `apex/normalization/fused_layer_norm.py`.
    """
    if kernels.layer_norm == "torch":
        return None
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return fused_layer_norm_affine(x, weight, bias, list(weight.shape), eps)

    return layer_norm
