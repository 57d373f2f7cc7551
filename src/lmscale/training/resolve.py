"""From the configuration of a pretraining to what its ranks run: every check, and every `auto` decided, once.

What only the ranks can decide is in `agreement.py`. torch takes seconds to import, so this file imports what needs it
only after the checks that do not, or on a machine that may have a GPU.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import BatchConfig, TransformerConfig
from ..config.family import check_loads
from ..config.pretrain import RunConfig
from ..data.prepare import PreparedCorpus, check_corpus, prepare_corpus
from ..data.sampler import resolve_validation
from ..data.tokenizer import check_tokenizer
from ..kernels import Kernels
from ..planner.flops import model_flops_per_step
from ..planner.workload import STAND_IN_VOCAB_SIZE, Workload
from ..runtime import accelerator
from ..runtime.run_lock import check_not_in_use, run_folder_errors
from ..runtime.world import World, is_first_rank, is_restart, world_from_outside
from . import fit
from .job import Job
from .kernel_choice import check_cuda_graphs, check_determinism, resolve_kernels


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
        num_validation_samples: sequences scored each time; None: all.
    """

    batch: BatchConfig
    corpus: PreparedCorpus
    num_validation_samples: int | None


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
    resumed = None
    if checked.checkpoint is not None:
        from ..checkpoint import check_model, read_metadata
        from .checkpoints.resuming import check_fit

        found = read_metadata(checked.checkpoint)
        check_model(found, model, checked.checkpoint)
        check_fit(run, corpus.content_hash, checked.checkpoint, found)
        resumed = None if run.resume.weights_only else found.run
    num_validation = resolve_validation(run, corpus, checked.on_gpu, resumed)
    decided = vars(checked) | {"model": model, "files": files or {}}
    return ResolvedRun(**decided, batch=batch, corpus=corpus, num_validation_samples=num_validation)


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
    check_loads(run.model.family)
    device = accelerator.resolve_accelerator(run.trainer.accelerator)
    on_gpu = device == "gpu"
    if on_gpu:
        accelerator.set_allocator(run.cuda_graphs)
        accelerator.check_products(run.precision.dtype)
    checkpoint, kept, folder = None, None, Path(run.run_dir)
    with run_folder_errors(folder):
        if is_first_rank():
            check_not_in_use(folder)
        is_used = folder.is_dir() and any(folder.iterdir())
    if run.resume.path != "none" or is_restart() or is_used:
        from .checkpoints.resuming import find_checkpoint, kept_metadata  # imports torch

        with run_folder_errors(folder):
            checkpoint = find_checkpoint(run)
        kept = None if run.resume.weights_only else kept_metadata(checkpoint, on_gpu)

    config = run.model.resolve(STAND_IN_VOCAB_SIZE)
    flops = run.trainer.max_steps * model_flops_per_step(config, run.data.seq_length, run.global_batch_size)
    kernels, attention, choice = resolve_kernels(run, on_gpu, kept, flops // (world or World()).num_hosts)
    # The memory of a rank depends on the kernels, and these on neither the layout nor the recomputation.
    workload = Workload.of(run, attention or "sdpa", compiles=kernels.compiles, on_gpu=on_gpu)
    layout = fit.resolve_layout(run.parallel, workload, world)
    run.check_layout(layout)
    fit.check_host(run, layout, world)
    workload = fit.resolve_recompute(run, workload, layout)
    fit.check_memory(run.name, workload, layout, world)
    if run.checkpoint.async_ or layout.zero1:
        fit.check_copies("parallel.zero1" if layout.zero1 else "checkpoint.async", workload, layout, world)
    recompute = workload.config.recompute
    check_cuda_graphs(kernels, on_gpu, run.precision.dtype, recompute, layout.tp_size, layout.pp_size)
    if on_gpu and layout.world_size == 1:
        check_determinism(run.deterministic)
    check_tokenizer(run.tokenizer, run.model.family)
    return CheckedRun(
        run=run,
        layout=layout,
        accelerator=device,
        model=workload.config,
        measures_attention=attention is None,
        kernels=kernels,
        checkpoint=checkpoint,
        compile_choice=choice,
    )


def check_paths(run: RunConfig, world: World | None) -> None:
    """Check that the corpus and the checkpoint of a run and wandb are there, and what a restart would go on from.

    Raises:
        ValueError: one is missing; torchrun may restart the run, which would not look for its own checkpoints.
    """
    check_corpus(run.data, run.model.family)
    if run.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("`logger.wandb` must be false where wandb is not installed (pip install wandb), but is true")
    path = run.resume.path
    # `max_restarts` decides, because a node that only waited for another node's restart has counted no restart.
    if world is not None and world.launcher == "torchrun" and world.max_restarts and path != "auto":
        raise ValueError(
            f"`resume` must be auto under torchrun's --max-restarts, or a restart loses what was trained, but is {path}"
            "; a first start without restarts can begin from another checkpoint"
        )
    if world is not None and run.max_restarts:
        raise ValueError(
            f"`max_restarts` must be 0 where {world.launcher} has started the ranks, which restarts them itself "
            f"(torchrun --max-restarts, sbatch --requeue), but is {run.max_restarts}"
        )
    if not is_restart() and path not in ("none", "auto") and not os.path.exists(path):
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {path!r} does not exist")
