"""The kernels and the attention of a run: `compile`, `kernels`, `cuda_graphs`, `deterministic`, `model.attention`."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from ..config.model import WITHOUT_DROPOUT
from ..config.pretrain import RunConfig
from ..kernels import Kernels, apex_problem
from ..runtime.machine import usable_cores

# From analysis/benchmarks/records/attention_cpu.json, two cores: a compiled step in bf16 takes 15 to 39 % less time
# than eager sdpa, and the compiler takes up to 35 s with an empty cache. An eager step computes up to 0.18 TFLOP/s per
# core (attention_cpu_3_rounds.json, 1,024 tokens). So a run of twenty minutes gains three at least; on cores that are
# five times as fast it still gains what the compiler takes.
FLOPS_PER_S_PER_CORE = 0.2e12
LEAST_SECONDS = 20 * 60
GPU_ATTENTIONS = ("flash", "efficient", *WITHOUT_DROPOUT)  # values of `model.attention` that only a GPU has
_determinism: set[bool] = set()  # of the jobs of this process so far


def resolve_kernels(run: RunConfig, on_gpu: bool, kept: Any, flops: int) -> tuple[Kernels, str | None, str]:
    """The kernels; the attention, None where it has to be measured; and the choice of `compile` in words.

    Args:
        kept: metadata of the checkpoint whose kernels the run keeps, or None.
        flops: of the whole run on each host, about.

    Raises:
        ValueError: what this machine cannot compute with.
    """
    kept_compile, dtype = keep_compile(run, on_gpu, kept), run.precision.dtype
    layer_norm, compiles = choose_kernels(on_gpu, run.kernels, kept_compile, compiling_pays(dtype, flops))
    kernels = Kernels(layer_norm, dtype == "fp8", compiles, run.cuda_graphs)
    attention = resolve_attention(run, on_gpu, compiles, kept)
    choice = f"compile={str(run.compile).lower()}"
    if run.compile == "auto":
        choice += f": {'compiled' if compiles else 'eager'}"
        choice += ", as in the checkpoint" * (kept_compile != "auto")
    return kernels, attention, choice


def choose_kernels(
    on_gpu: bool, kernels: str = "torch", compiles: bool | str = "auto", pays_on_cpu: bool = False
) -> tuple[str, bool]:
    """Resolve a run's `kernels=` and `compile=` on this machine.

    `compiles=auto` compiles on a GPU, but not with apex, which torch.compile cannot trace, and on a CPU where
    `pays_on_cpu` says that the run is long enough. `kernels=auto` is apex on a GPU if it is installed and nothing is
    compiled (the compiler fuses LayerNorm with its neighbours), else torch.

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
    return "apex" if uses_apex else "torch", compiles


def compiling_pays(dtype: str, flops: int) -> bool:
    """Whether a run on CPUs is long enough for compilation to save time.

    A partial run (`trainer.stop_after_steps`, a resumed one) makes the same decision as the whole run on the same
    number of cores, so that it computes the same bits. fp64, which is there for exactness, and fp16, which CPUs
    emulate, are not compiled.

    Args:
        flops: of the whole run (`trainer.max_steps`) on each host.
    """
    if dtype not in ("fp32", "bf16") or not _has_compiler():
        return False
    return flops >= LEAST_SECONDS * FLOPS_PER_S_PER_CORE * usable_cores()


def _has_compiler(on_gpu: bool = False) -> bool:
    """Whether torch.compile can build kernels: a C++ compiler for this CPU or, for a GPU, the C compiler that Triton
    looks for; and Python's headers."""
    usual = ("gcc", "clang") if on_gpu else ("clang++" if sys.platform == "darwin" else "g++",)
    named = os.environ.get("CC" if on_gpu else "CXX")
    found = any(map(shutil.which, usual if named is None else (named,)))
    # The default scheme of Debian's Python names a folder without Python.h.
    return found and (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").is_file()


def keep_compile(run: RunConfig, on_gpu: bool, kept: Any) -> bool | str:
    """`compile`; where it is `auto`, what the run's checkpoint was trained with, if this machine can compute so.

    Args:
        kept: metadata of the checkpoint whose kernels the run keeps, or None.
    """
    if run.compile != "auto" or kept is None:
        return run.compile
    compiled = kept.run.get("compile", "auto")
    possible = run.kernels != "apex" if on_gpu else _has_compiler()
    return compiled if possible or compiled is not True else "auto"


def resolve_attention(run: RunConfig, on_gpu: bool, compiles: bool, kept: Any) -> str | None:
    """`model.attention`, with `auto` resolved; None where it has to be measured.

    A run that is resumed on the same accelerator keeps what its checkpoint was trained with.

    Raises:
        ValueError: as `check_attention`, or layers that no compiler here can build.
    """
    if compiles and not _has_compiler(on_gpu):
        needed = (
            "be false without a C compiler (CC, gcc or clang)" if on_gpu else "be false or auto without a C++ compiler"
        )
        raise ValueError(f"`compile` must {needed} and Python's headers, but is {str(compiles).lower()}")
    requested = run.model.attention
    check_attention(requested, on_gpu, run.precision.dtype)
    if requested != "auto":
        return requested
    if kept is not None and (on_gpu or kept.model["attention"] not in GPU_ATTENTIONS):
        return kept.model["attention"]
    if on_gpu:
        return "sdpa" if run.deterministic else None  # two measurements need not agree
    return choose_attention(compiles, run.model.attention_dropout)


def check_attention(attention: str, on_gpu: bool, dtype: str) -> None:
    """Refuse a kernel that this machine or the type of a run does not have.

    Raises:
        ValueError: a GPU's kernel on a CPU, one of half types in another, FlashAttention-3 that is not installed.
    """
    if attention in GPU_ATTENTIONS and not on_gpu:
        raise ValueError(f"`model.attention` must be sdpa, exact or auto on a CPU, but is {attention}")
    if attention in WITHOUT_DROPOUT and dtype in ("fp32", "fp64"):
        raise ValueError(f"`model.attention` must not be {attention} with precision={dtype}: its kernel has half types")
    if attention == "flash3" and importlib.util.find_spec("flash_attn_interface") is None:
        raise ValueError("`model.attention` must not be flash3 if flash_attn_interface is not installed, but is flash3")


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


def check_determinism(deterministic: bool) -> None:
    """Refuse a second job of this process whose `deterministic` differs, where the process itself computes on a GPU.

    cuBLAS reads `CUBLAS_WORKSPACE_CONFIG`, which Lightning sets for a deterministic job, only once.

    Raises:
        ValueError: jobs with and without it.
    """
    if _determinism - {deterministic}:
        raise ValueError("`deterministic` must be the same for all jobs of a sweep, which share the GPU's cuBLAS")
    _determinism.add(deterministic)
