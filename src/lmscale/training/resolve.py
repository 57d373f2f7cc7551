"""From the configuration of a pretraining to what its ranks run: every check, and every `auto` decided, once.

Nothing after this file knows `auto`. What only the ranks can decide is in `agreement.py`. torch takes seconds to
import, so this file imports what needs it only after the checks that do not, or on a machine that may have a GPU.
"""

import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import BatchConfig, Layout, Recompute, TransformerConfig
from ..config.family import check_loads
from ..config.layout import ParallelConfig
from ..config.pretrain import RunConfig
from ..config.training import OptimizerConfig, ScheduleConfig
from ..data.prepare import check_corpus, prepare_corpus
from ..data.prepared import PreparedCorpus
from ..data.tokenizer import check_tokenizer
from ..kernels import GPU_ATTENTIONS, Kernels, check_cuda_graphs, choose_attention, choose_kernels
from ..launcher import World, is_first_rank, is_restart, world_from_outside
from ..planner.flops import model_flops_per_step
from ..planner.workload import (
    STAND_IN_VOCAB_SIZE,
    Workload,
    first_mode_that_fits,
    largest_dp_size,
    smallest_layout,
    usable_bytes,
)
from . import fit
from .job import Job
from .measured_layout import read_measured_layout
from .runtime.run_lock import check_not_in_use

# From analysis/benchmarks/records/attention_cpu.json, two cores: a compiled step in bf16 takes 15 to 39 % less time
# than eager sdpa, and the compiler takes up to 35 s with an empty cache. An eager step computes up to 0.18 TFLOP/s per
# core (attention_cpu_3_rounds.json, 1,024 tokens). So a run of twenty minutes gains three at least; on cores that are
# five times as fast it still gains what the compiler takes.
FLOPS_PER_S_PER_CORE = 0.2e12
LEAST_SECONDS = 20 * 60
FLOAT8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True, kw_only=True)
class CheckedRun(Job):
    """A run with all decisions that need no corpus.

    Args:
        model: the one model config of the job; `vocab_size` is a stand-in until the corpus is read.
        measures_attention: rank 0 replaces `model.attention` by the fastest, see `Agreement`.
        checkpoint: path of the one to start from; None: the seed determines the weights.
        compile_choice: `compile=` as requested and what it was resolved to, for the first lines of the run.
    """

    run: RunConfig
    model: TransformerConfig
    measures_attention: bool
    kernels: Kernels
    checkpoint: str | None
    compile_choice: str


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(CheckedRun):
    """A run ready for its ranks: no `auto` is left outside `run`.

    Args:
        corpus_hash: of the tokenized training text.
        optimizer, schedule: the run's, or with `resume.schedule=keep` the checkpoint's.
    """

    batch: BatchConfig
    corpus: PreparedCorpus
    corpus_hash: str
    optimizer: OptimizerConfig
    schedule: ScheduleConfig


def resolve(run: RunConfig, files: dict[str, str] | None = None) -> ResolvedRun:
    """Check a run, cheap checks first: paths, sizes, memory, checkpoint; then read and tokenize the corpus once.

    Args:
        files: texts by path, written into the run folder when training starts.

    Raises:
        ValueError: anything invalid in the configuration, in one line.
    """
    checked = check(run)
    corpus = prepare_corpus(run.data, run.tokenizer, run.model.family, run.model.vocab_size)
    model = run.model.resolve(corpus.vocab_size, checked.model.attention, checked.model.recompute)
    batch = run.check_layout(checked.layout, model)
    corpus_hash = build_data(run, corpus, batch).corpus_hash  # refuses a small corpus before any rank starts
    optimizer, schedule = run.optimizer, run.schedule
    if checked.checkpoint is not None:
        from .output.resuming import check_fit

        optimizer, schedule = check_fit(run, model, corpus_hash, checked.checkpoint)
    decided = vars(checked) | {"model": model, "files": files or {}}
    return ResolvedRun(
        **decided, batch=batch, corpus=corpus, corpus_hash=corpus_hash, optimizer=optimizer, schedule=schedule
    )


def check_values(values: dict) -> None:
    """`check` for a configuration in plain values, for the jobs of a sweep."""
    check(RunConfig.from_dict(values))


def check(run: RunConfig) -> CheckedRun:
    """Check all of a run that needs no corpus: the machine, sizes, memory, paths.

    Raises:
        ValueError: anything invalid in the configuration, in one line.
    """
    world = world_from_outside()
    check_paths(run, world)
    accelerator = resolve_accelerator(run.trainer.accelerator)
    on_gpu = accelerator == "gpu"
    if on_gpu:
        from .runtime.gpu_settings import set_allocator

        set_allocator(run.cuda_graphs)
    if run.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("`logger.wandb` must be false where wandb is not installed (pip install wandb), but is true")
    if is_first_rank():
        check_not_in_use(Path(run.run_dir))
    is_new = run.resume.path == "none" and not is_restart()
    checkpoint, kept = (None, None) if is_new else _find_checkpoint(run, on_gpu)

    kept_compile = keep_compile(run, on_gpu, kept)
    pays_on_cpu = compiling_pays(run, 1 if world is None else world.size // world.local_size)
    kernels = choose_kernels(
        on_gpu=on_gpu,
        kernels=run.kernels,
        compiles=kept_compile,
        pays_on_cpu=pays_on_cpu,
        cuda_graphs=run.cuda_graphs,
        dtype=run.precision.dtype,
    )
    parallel, num_threads = run.parallel, run.trainer.num_threads
    if parallel.record is not None:
        parallel, num_threads = read_measured_layout(run, on_gpu, kernels.compiles)
    attention = resolve_attention(run, on_gpu, kernels.compiles, kept)
    # The memory of a rank depends on the kernels, and these on neither the layout nor the recomputation.
    workload = workload_of(run, kernels.compiles, attention or "sdpa")
    layout = resolve_layout(parallel, workload, world, accelerator)
    run.check_layout(layout)
    workload = resolve_recompute(run, workload, layout, on_gpu)
    check_cuda_graphs(kernels, on_gpu, run.precision.dtype, workload.config.recompute.value, layout.tp_size)
    if kernels.float8 and on_gpu:
        import torch

        check_float8(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    fit.check_host(run, layout, num_threads, world)
    fit.check_memory(run.name, workload, layout, world, on_gpu)
    if run.checkpoint.async_:
        fit.check_background_saves(workload, layout, world, on_gpu)
    check_tokenizer(run.tokenizer, run.model.family)
    check_loads(run.model.family)
    if is_new:
        _find_checkpoint(run, on_gpu)  # refuses a run folder that has one
    choice = f"compile={str(run.compile).lower()}"
    if run.compile == "auto":
        choice += f": {'compiled' if kernels.compiles else 'eager'}"
        choice += ", as in the checkpoint" * (kept_compile != "auto")
    return CheckedRun(
        run=run,
        layout=layout,
        accelerator=accelerator,
        num_threads=num_threads,
        model=workload.config,
        measures_attention=attention is None,
        kernels=kernels,
        checkpoint=checkpoint,
        compile_choice=choice,
    )


def check_paths(run: RunConfig, world: World | None) -> None:
    """Check that the corpus and the checkpoint of a run exist, and that a restart by torchrun would go on from it.

    Raises:
        ValueError: one is missing; torchrun may restart the run, which would not look for its own checkpoints.
    """
    check_corpus(run.data, run.model.family)
    path = run.resume.path
    # `max_restarts` decides, because a node that only waited for another node's restart has counted no restart.
    if world is not None and world.launcher == "torchrun" and world.max_restarts and path != "auto":
        raise ValueError(
            f"`resume` must be auto under torchrun's --max-restarts, or a restart loses what was trained, but is {path}"
            "; a first start without restarts can begin from another checkpoint"
        )
    if not is_restart() and path not in ("none", "auto") and not Path(path).exists():
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {path!r} does not exist")


def resolve_accelerator(requested: str) -> Literal["cpu", "gpu"]:
    """Whether a run requests `trainer.accelerator=gpu`, or `auto` finds one.

    Raises:
        ValueError: `gpu` without a GPU that torch can use, or a rank does not see the GPUs of its node's ranks.
    """
    if requested == "cpu" or (requested == "auto" and not _may_have_gpu()):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if requested == "gpu":
            raise ValueError("`trainer.accelerator` must be cpu or auto on a machine without a GPU, but is gpu")
        return "cpu"
    world = world_from_outside()
    if world is not None and torch.cuda.device_count() < world.local_size:
        raise ValueError(
            f"every rank must see the GPUs of all {world.local_size} ranks of its node, but sees "
            f"{torch.cuda.device_count()} (Slurm: --gpus-per-node, not --gpus-per-task)"
        )
    return "gpu"


def _may_have_gpu() -> bool:
    """Whether torch might find a GPU: NVIDIA's driver is installed, or the kernel has AMD's device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def _find_checkpoint(run: RunConfig, on_gpu: bool) -> tuple[str | None, Any]:
    """The checkpoint to start from, and its metadata if the run keeps its kernels."""
    from .output.resuming import find_checkpoint, kept_metadata

    path = find_checkpoint(run)
    return path, None if run.resume.weights_only else kept_metadata(path, on_gpu)


def compiling_pays(run: RunConfig, num_hosts: int) -> bool:
    """Whether a run on CPUs is long enough for compilation to save time, by its whole length (`trainer.max_steps`).

    A partial run (`trainer.stop_after_steps`, a resumed one) makes the same decision as the whole run on the same
    number of cores, so that it computes the same bits. fp64, which is there for exactness, and fp16, which CPUs
    emulate, are not compiled.
    """
    if run.precision.dtype not in ("fp32", "bf16") or not _has_compiler():
        return False
    config = run.model.resolve(STAND_IN_VOCAB_SIZE)
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
        ValueError: a GPU's backend on a CPU, or layers that no compiler here can build.
    """
    if compiles and not _has_compiler(on_gpu):
        needed = (
            "be false without a C compiler (CC, gcc or clang)" if on_gpu else "be false or auto without a C++ compiler"
        )
        raise ValueError(f"`compile` must {needed} and Python's headers, but is {str(compiles).lower()}")
    requested = run.model.attention
    if requested in GPU_ATTENTIONS and not on_gpu:
        raise ValueError(f"`model.attention` must be sdpa, exact or auto on a CPU, but is {requested}")
    if requested != "auto":
        return requested
    if kept is not None and (on_gpu or kept.model["attention"] not in GPU_ATTENTIONS):
        return kept.model["attention"]
    if on_gpu:
        return "sdpa" if run.deterministic else None  # two measurements need not agree
    return choose_attention(compiles, run.model.attention_dropout)


def workload_of(run: RunConfig, compiles: bool = False, attention: str = "sdpa") -> Workload:
    """The run as the planner sees it; until `model.recompute=auto` is resolved, nothing is recomputed.

    Args:
        attention: in place of `model.attention=auto`.
    """
    return Workload(
        run.model.resolve(STAND_IN_VOCAB_SIZE, attention),
        run.micro_batch_size,
        run.global_batch_size,
        run.data.seq_length,
        run.precision.dtype,
        run.trainer.max_steps,
        half_moments=run.optimizer.moments == "bf16",
        compiles=compiles,
    )


def resolve_layout(request: ParallelConfig, workload: Workload, world: World | None, accelerator: str) -> Layout:
    """Resolve the sizes of the grid.

    Args:
        world: ranks that another launcher has started; None if lmscale will start them on this host.

    Raises:
        ValueError: the world size does not match, or no size fits (`auto`).
    """
    tp_size, dp_size, on_gpu = request.tp_size, request.dp_size, accelerator == "gpu"
    devices = world.size if world is not None else _count_gpus() if on_gpu else 1

    def data_ranks(tp: int) -> int:
        if dp_size != "auto":
            return dp_size
        if world is not None:  # all ranks that were started must be used
            return max(1, devices // tp)
        return largest_dp_size(workload.global_batch_size // workload.micro_batch_size, devices // tp)

    if tp_size == "auto":
        ranks, memory = 1, fit.device_memory(on_gpu)
        if not on_gpu:  # the local ranks share the host's memory
            ranks = world.local_size if world is not None else 1 if dp_size == "auto" else dp_size
        usable = usable_bytes(memory, on_gpu, ranks)
        found = smallest_layout(workload, lambda tp: request.layout(tp_size=tp, dp_size=data_ranks(tp)), usable, on_gpu)
        tp_size = None if found is None else found.tp_size
        # If lmscale starts the ranks on this host, more ranks need more of its memory, never less.
        if tp_size is None or (tp_size > 1 and not on_gpu and world is None):
            raise ValueError(
                "no tp_size fits (`parallel.tp_size`=auto): no power of two divides the model and fits the "
                f"{memory / 2**30:.1f} GiB of {'a GPU' if on_gpu else 'free memory of this host'}"
            )
    layout = request.layout(tp_size=tp_size, dp_size=data_ranks(tp_size))
    if world is not None and layout.world_size != world.size:
        raise ValueError(
            f"the world size must be `parallel.tp_size` x `parallel.dp_size` ({tp_size} x {layout.dp_size}), "
            f"but {world.size} ranks were started"
        )
    if world is None and on_gpu and layout.world_size > devices:
        way_out = "" if request.tp_size == "auto" else "; trainer.accelerator=cpu trains on its cores"
        raise ValueError(
            f"`parallel.tp_size` x `parallel.dp_size` ({tp_size} x {layout.dp_size}) must be at most the GPUs of this "
            f"host, but it has {devices}{way_out}"
        )
    return layout


def resolve_recompute(run: RunConfig, workload: Workload, layout: Layout, on_gpu: bool) -> Workload:
    """The work with `model.recompute=auto` resolved: on a GPU the mode that recomputes least of those that fit.

    On a CPU none: free memory changes and differs between hosts, and ranks that chose different modes would deadlock.
    If no mode fits it is none too, and `check_memory` refuses the run.
    """
    if run.model.recompute != "auto" or not on_gpu:
        return workload
    mode = first_mode_that_fits(workload, layout, usable_bytes(fit.device_memory(True), True), True)
    return workload.change(recompute=mode or Recompute.NONE)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_float8(device_name: str, capability: tuple[int, int]) -> None:
    """Refuse a GPU that has no float8 products.

    Raises:
        ValueError: its compute capability is below that of Ada and Hopper.
    """
    if capability < FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (FLOAT8_CAPABILITY, capability))
        raise ValueError(
            f"`precision` must be bf16 or another on a {device_name}: float8 products need compute capability {needed} "
            f"(it has {found}), but is fp8"
        )


def build_data(run: RunConfig, corpus: PreparedCorpus, batch: BatchConfig) -> Any:
    """The `PretrainDataModule`: the run's samples in their order; see there for errors."""
    from ..data.datamodule import PretrainDataModule  # imports Lightning

    trainer, by_length = run.trainer, run.loss_reduction == "token_mean"
    steps, num_validation = trainer.max_steps, trainer.num_validation_samples
    return PretrainDataModule(corpus, run.data, batch, run.seed, steps, num_validation, by_length)
