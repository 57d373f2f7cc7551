"""The choice of kernels that compute the layers: torch's own, compiled ones or NVIDIA's apex.

apex is optional and never a silent fallback: a run that requests it without being able to use it is refused.
"""

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
GPU_ATTENTIONS = ("flash", "efficient")  # values of `model.attention` that only a GPU has


def choose_kernels(
    *,
    on_gpu: bool,
    kernels: str = "torch",
    compiles: bool | str = "auto",
    pays_on_cpu: bool = False,
    cuda_graphs: bool = False,
    dtype: str = "bf16",
) -> Kernels:
    """Resolve a run's `kernels=`, `compile=` and `cuda_graphs=` on this machine.

    `compiles=auto` compiles on a GPU, but not with apex, which torch.compile cannot trace, and on a CPU where
    `pays_on_cpu` says that the run is long enough. `kernels=auto` is apex on a GPU if it is installed and nothing is
    compiled (the compiler fuses LayerNorm with its neighbours), else torch. `check_cuda_graphs` says whether graphs are
    possible.

    Raises:
        ValueError: an impossible request: apex without NVIDIA's package, on a CPU or compiled.
    """
    problem = apex_problem() if kernels != "torch" else None
    if kernels == "apex":
        if problem is not None:
            raise ValueError(f"`kernels` must be torch or auto here, because {problem}, but is apex")
        if not on_gpu:
            raise ValueError("`kernels` must be torch or auto on a CPU, for which apex has none, but is apex")
        if compiles is True:
            raise ValueError("`kernels` must be torch or auto with compile=true, which fuses LayerNorm, but is apex")
    if compiles == "auto":
        compiles = kernels != "apex" if on_gpu else pays_on_cpu
    uses_apex = kernels != "torch" and on_gpu and not compiles and problem is None
    return Kernels("apex" if uses_apex else "torch", dtype == "fp8", compiles, cuda_graphs)


def choose_attention(compiles: bool, dropout: float) -> str:
    """The attention that is fastest on a CPU, by what was measured; on a GPU each run measures.

    With dropout no fused kernel runs on a CPU, and the compiler fuses the mask of `exact` with the softmax. Record:
    analysis/benchmarks/records/attention_cpu.json.
    """
    return "exact" if compiles and dropout > 0 else "sdpa"


def check_cuda_graphs(
    kernels: Kernels, on_gpu: bool, dtype: str, recompute: str, tp_size: int, pp_size: int = 1
) -> None:
    """Refuse CUDA graphs that cannot be recorded.

    Raises:
        ValueError: no GPU, no compiled layers, no half type, layers that are recomputed, several tensor ranks or
            stages.
    """
    reasons = {
        "on a CPU": not on_gpu,
        "where layers are not compiled": not kernels.compiles,
        # Gradients are in the graphs' memory until the next replay; those of half types are moved out at once.
        f"with precision={dtype}, whose gradients stay where a graph made them": dtype in ("fp32", "fp64"),
        f"with model.recompute={recompute}": recompute != "none",
        f"with parallel.tp_size={tp_size}: collectives are not recorded": tp_size > 1,
        f"with parallel.pp_size={pp_size}: a replay overwrites what an earlier forward pass has kept": pp_size > 1,
    }
    for reason, applies in reasons.items():
        if kernels.cuda_graphs and applies:
            raise ValueError(f"`cuda_graphs` must be false {reason}, but is true")


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
