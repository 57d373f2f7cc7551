"""`compile=auto` and `model.attention=auto`, resolved once and the same on all ranks."""

import dataclasses
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from ...checkpoint import CheckpointMetadata, read_metadata
from ...config.pretrain import RunConfig
from ...kernels import choose_attention
from ...models.attention_backend import BACKENDS, fastest_backend
from ...planner.flops import model_flops_per_step
from ...planner.job import STAND_IN_VOCAB_SIZE
from ..job import PretrainJob
from ..output.resuming import Start
from ..step.module import DTYPES
from ..strategy import TensorParallelStrategy

# From analysis/benchmarks/records/attention_cpu.json, two cores: a compiled step in bf16 takes 15 to 39 % less time
# than eager sdpa, and the compiler takes up to 35 s with an empty cache. An eager step computes up to 0.18 TFLOP/s per
# core (attention_cpu_3_rounds.json, 1,024 tokens). So a run of twenty minutes gains three at least; on cores that are
# five times as fast it still gains what the compiler takes.
FLOPS_PER_S_PER_CORE = 0.2e12
LEAST_SECONDS = 20 * 60


def compiling_pays(run: RunConfig, num_hosts: int) -> bool:
    """Whether a run on CPUs is long enough for compilation to save time, by its whole length (`trainer.max_steps`).

    A partial run (`trainer.stop_after_steps`, a resumed one) makes the same decision as the whole run on the same
    number of cores, so that it computes the same bits. fp64, which is there for exactness, and fp16, which CPUs
    emulate, are not compiled.
    """
    if run.precision.dtype not in ("fp32", "bf16") or not _has_compiler():
        return False
    config = run.model.with_vocab_size(STAND_IN_VOCAB_SIZE)
    flops = run.trainer.max_steps * model_flops_per_step(config, run.data.seq_length, run.global_batch_size)
    return flops >= LEAST_SECONDS * FLOPS_PER_S_PER_CORE * num_hosts * (os.cpu_count() or 1)


def _has_compiler(on_gpu: bool = False) -> bool:
    """Whether torch.compile can build kernels: a C++ compiler for this CPU or, for a GPU, the C compiler that Triton
    looks for; and Python's headers."""
    usual = ("gcc", "clang") if on_gpu else ("clang++" if sys.platform == "darwin" else "g++",)
    named = os.environ.get("CC" if on_gpu else "CXX")
    found = any(map(shutil.which, usual if named is None else (named,)))
    # A Debian Python's own scheme names a folder that has none.
    return found and (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").is_file()


def _kept(checkpoint: str | None, on_gpu: bool) -> CheckpointMetadata | None:
    """The checkpoint that a run resumes from, if the run keeps its kernels: it was written on the same accelerator.

    A resumed run that decided anew, on a different number of cores or by another measurement, would round otherwise and
    draw other dropout. A run that goes on from a CPU to a GPU, or back, does so in any case.
    """
    if checkpoint is None:
        return None
    metadata = read_metadata(checkpoint)
    accelerator = metadata.run.get("trainer", {}).get("accelerator", "auto")  # older versions did not resolve auto
    return metadata if accelerator in ("auto", "gpu" if on_gpu else "cpu") else None


def _resumed(run: RunConfig, resume_from: str | None) -> str | None:
    return None if run.resume.weights_only else resume_from


def kept_compile(run: RunConfig, on_gpu: bool, resume_from: str | None) -> bool | str:
    """`compile`; where it is `auto`, what the run's checkpoint was trained with, if this machine can compute so."""
    metadata = _kept(_resumed(run, resume_from), on_gpu) if run.compile == "auto" else None
    if metadata is None:
        return run.compile
    kept = metadata.run.get("compile", "auto")
    possible = run.kernels != "apex" if on_gpu else _has_compiler()
    return kept if possible or kept is not True else "auto"


def describe_compile(run: RunConfig, on_gpu: bool, resume_from: str | None, compiles: bool) -> str:
    """`compile=` as requested in `run` and, if that is `auto`, what it was resolved to."""
    if run.compile != "auto":
        return f"compile={str(run.compile).lower()}"
    kept = kept_compile(run, on_gpu, resume_from) != "auto"
    return f"compile=auto: {'compiled' if compiles else 'eager'}" + ", as in the checkpoint" * kept


def resolve_attention(run: RunConfig, on_gpu: bool, compiles: bool, resume_from: str | None) -> RunConfig:
    """The run with `model.attention=auto` resolved, except where it has to be measured (`settle_kernels`).

    A run that is resumed on the same accelerator keeps what its checkpoint was trained with.

    Raises:
        ValueError: a GPU's backend on a CPU, or layers that no compiler here can build.
    """
    if compiles and not _has_compiler(on_gpu):
        needed = (
            "be false without a C compiler (CC, gcc or clang)" if on_gpu else "be false or auto without a C++ compiler"
        )
        raise ValueError(f"`compile` must {needed} and Python's headers, but is {str(run.compile).lower()}")
    if run.model.attention in BACKENDS and not on_gpu:
        raise ValueError(f"`model.attention` must be sdpa, exact or auto on a CPU, but is {run.model.attention}")
    if run.model.attention != "auto":
        return run
    metadata = _kept(_resumed(run, resume_from), on_gpu)
    kept = None if metadata is None else metadata.model["attention"]
    if kept is not None and (on_gpu or kept not in BACKENDS):
        attention = kept
    elif on_gpu and run.deterministic:  # two measurements need not agree
        attention = "sdpa"
    else:
        attention = choose_attention(on_gpu, compiles, run.model.attention_dropout)
    return dataclasses.replace(run, model=run.model.with_attention(attention))


def settle_kernels(job: PretrainJob, start: Start, strategy: TensorParallelStrategy) -> PretrainJob:
    """The job with rank 0's kernels, attention and recomputation; on a GPU rank 0 measures `model.attention=auto`.

    With `model.recompute=auto` ranks on GPUs of different sizes would choose different modes, and then deadlock.

    Ranks that were started again continue with the attention of the run's own checkpoint, if a GPU wrote it. What
    earlier jobs of the process compiled is forgotten: torch.compile does not see the order of attention backends, and
    keeps a limited number of graphs of one function.

    Communicates:
        one small object from rank 0 to the world.
    """
    attention = job.config.attention
    resumed = start.checkpoint if attention == "auto" and start.resumes else None
    metadata = _kept(resumed, job.accelerator == "gpu")
    if metadata is not None:
        attention = metadata.model["attention"]
    elif attention == "auto" and strategy.is_global_zero:
        dtype, length = DTYPES[job.run.precision.dtype], job.run.data.seq_length
        sizes = job.layout.tp_size, job.run.micro_batch_size, length
        attention = fastest_backend(job.config, *sizes, dtype, strategy.root_device)
    kernels, attention, recompute = strategy.broadcast((job.kernels, attention, job.config.recompute))
    if kernels.compiles:
        torch.compiler.reset()
    model, config = (
        dataclasses.replace(sizes.with_attention(attention), recompute=recompute)
        for sizes in (job.run.model, job.config)
    )
    run = dataclasses.replace(job.run, model=model)
    return dataclasses.replace(job, run=run, config=config, kernels=kernels)
