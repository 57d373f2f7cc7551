"""The kernels that compute the layers: torch's own, compiled ones or NVIDIA's apex, which is optional."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kernels:
    """The kernels that compute a model's layers.

    Args:
        layer_norm: `torch` or `apex`.
        float8: the matrix products of the linear layers, forward and backward, are in float8.
        compiles: torch.compile fuses each layer (one graph for all) and the passes over the logits.
        cuda_graphs: the compiled layers are recorded on a GPU and replayed.
    """

    layer_norm: str = "torch"
    float8: bool = False
    compiles: bool = False
    cuda_graphs: bool = False

    def describe(self) -> str:
        """The choice in a few words, for the first lines of a run."""
        compiled = "layers compiled" if self.compiles else "layers not compiled"
        graphs = ", replayed as CUDA graphs" if self.cuda_graphs else ""
        return f"{compiled}{graphs}, LayerNorm by {self.layer_norm}" + (", linears in float8" if self.float8 else "")


PLAIN = Kernels()


def apex_problem() -> str | None:
    """Why NVIDIA's apex cannot be used, or None; imports nothing, since it may be another package."""
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
