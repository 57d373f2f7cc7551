"""From the configuration of a pretraining to what its ranks run: every check, and every `auto` decided, once.

What only the ranks can decide is in `agreement.py`. torch takes seconds to import, so this file imports what needs it
only after the checks that do not, or on a machine that may have a GPU.
"""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.family import check_loads
from ..config.from_dict import keys_of
from ..config.layout import ParallelConfig
from ..config.model import ModelConfig
from ..config.pretrain import RunConfig
from ..config.validation import describe_excess, most_samples
from ..data.prepare import PreparedCorpus, check_corpus, prepare_corpus
from ..data.sampler import samples_of
from ..data.tokenizer import check_tokenizer
from ..planner.flops import model_flops_per_step
from ..planner.workload import STAND_IN_VOCAB_SIZE, Workload
from ..runtime import accelerator
from ..runtime.run_lock import check_not_in_use, run_folder_errors
from ..runtime.world import World, is_first_rank, is_restart, world_from_outside
from . import capacity
from .kernel_choice import check_cuda_graphs, check_determinism, resolve_kernels
from .run import Run, Start


def resolve(request: RunConfig, world: World | None = None, files: dict[str, str] | None = None) -> Run:
    """Check a run, cheap checks first: paths, sizes, memory, checkpoint; then read and tokenize the corpus once.

    Args:
        world: ranks that another launcher has started; None if lmscale will start them on this host.
        files: texts by path, written into the run folder when training starts.

    Raises:
        ValueError: anything invalid in the configuration, in one line.
    """
    run = check(request, world)
    corpus = prepare_corpus(request.data, request.tokenizer, request.model.family, request.model.vocab_size)
    model = request.model.resolve(corpus.vocab_size, run.model.attention, run.model.recompute)
    with keys_of(ModelConfig, "model."), keys_of(ParallelConfig, "parallel."):
        model.check_tensor_parallel(run.layout.tp_size, run.layout.pad_heads)  # the rows of the vocabulary are known
    if run.teacher is not None:
        run.teacher.check_corpus(corpus, model)
    resumed, start = None, run.start
    if start.checkpoint is not None:
        from .resuming import check_resumable

        start.checkpoint.check_model(model)
        if start.resumes:
            optimizer, schedule = check_resumable(request, corpus.content_hash, start.checkpoint, run.teacher)
            start = replace(start, optimizer=optimizer, schedule=schedule)
            resumed = start.checkpoint.metadata.run
    num_validation = resolve_validation(request, corpus, run.on_gpu, resumed)
    decided = {"model": model, "start": start, "corpus": corpus, "num_validation_samples": num_validation}
    return replace(run, files=files or {}, **decided)


def resolve_validation(
    request: RunConfig, corpus: PreparedCorpus, on_gpu: bool, resumed: dict[str, Any] | None = None
) -> int | None:
    """How many sequences are scored each time; None: all.

    Args:
        resumed: configuration of the run that a checkpoint continues, whose number `auto` keeps.

    Raises:
        ValueError: a corpus too small for a sample, or with fewer sequences than requested; a validation that takes too
            much of a GPU's time.
    """
    wanted, size = request.trainer.num_validation_samples, request.global_batch_size
    samples = samples_of(request, corpus, None if wanted == "auto" else wanted)
    if wanted == "auto":
        kept = (resumed or {}).get("trainer", {}).get("num_validation_samples", "auto")
        return samples.at_most(most_samples(request.trainer, size)) if kept == "auto" else kept
    if on_gpu and (costly := describe_excess(request.trainer, len(samples.scored), size)):
        raise ValueError(costly)
    return wanted


def check_values(values: dict) -> None:
    """`check` for a configuration in plain values, for the jobs of a sweep."""
    check(RunConfig.from_dict(values), world_from_outside())


def check(request: RunConfig, world: World | None = None) -> Run:
    """Check all of a run that needs no corpus: the machine, sizes, memory, paths.

    Raises:
        ValueError: anything invalid in the configuration, in one line.
    """
    check_paths(request, world)
    check_loads(request.model.family)
    device = accelerator.resolve_accelerator(request.trainer.accelerator)
    on_gpu = device == "gpu"
    if on_gpu:
        accelerator.set_allocator(request.cuda_graphs)
        accelerator.check_products(request.precision.dtype)
    checkpoint, folder = None, Path(request.run_dir)
    with run_folder_errors(folder):
        if is_first_rank():
            check_not_in_use(folder)
        is_used = folder.is_dir() and any(folder.iterdir())
    if request.resume.path != "none" or is_restart() or is_used:
        from .resuming import find_checkpoint  # imports torch

        with run_folder_errors(folder):
            checkpoint = find_checkpoint(request)
    start = Start.at(checkpoint, request, folder)

    teacher = None
    if request.teacher.is_given:
        from .teacher import check_teacher  # imports torch

        teacher = check_teacher(request)
    config = request.model.resolve(STAND_IN_VOCAB_SIZE)
    flops = request.trainer.max_steps * model_flops_per_step(config, request.data.seq_length, request.global_batch_size)
    flops_per_host, kept = flops // (world or World()).num_hosts, start.kept(on_gpu)
    kernels, attention, choice = resolve_kernels(request, on_gpu, kept, flops_per_host)
    # The memory of a rank depends on the kernels, and these on neither the layout nor the recomputation.
    workload = Workload.of(request, attention or "sdpa", compiles=kernels.compiles, on_gpu=on_gpu)
    workload = workload if teacher is None else replace(workload, **teacher.workload)
    chosen = capacity.choose(request, workload, world)
    layout, model = chosen.layout, chosen.workload.config
    check_cuda_graphs(kernels, on_gpu, request.precision.dtype, model.recompute, layout.tp_size, layout.pp_size)
    if on_gpu and layout.world_size == 1:
        check_determinism(request.deterministic)
    check_tokenizer(request.tokenizer, request.model.family)
    return Run(
        request=request,
        accelerator=device,
        layout=layout,
        batch=chosen.batch,
        model=model,
        kernels=kernels,
        compile_choice=choice,
        measures_attention=attention is None,
        start=start,
        teacher=teacher,
    )


def check_paths(request: RunConfig, world: World | None) -> None:
    """Check the paths of a run and wandb, and what a restart would go on from.

    Raises:
        ValueError: one is missing, or the run folder cannot be written; torchrun may restart the run, which would not
            look for its own checkpoints.
    """
    check_corpus(request.data, request.model.family)
    if Path(request.run_dir).exists() and not os.access(request.run_dir, os.W_OK | os.X_OK):
        raise ValueError(f"`hydra.run.dir` must be a folder that can be written, but is {request.run_dir}")
    if request.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("`logger.wandb` must be false where wandb is not installed (pip install wandb), but is true")
    path = request.resume.path
    # `max_restarts` decides, because a node that only waited for another node's restart has counted no restart.
    if world is not None and world.launcher == "torchrun" and world.max_restarts and path != "auto":
        raise ValueError(
            f"`resume` must be auto under torchrun's --max-restarts, or a restart loses what was trained, but is {path}"
            "; a first start without restarts can begin from another checkpoint"
        )
    if world is not None and request.max_restarts:
        raise ValueError(
            f"`max_restarts` must be 0 where {world.launcher} has started the ranks, which restarts them itself "
            f"(torchrun --max-restarts, sbatch --requeue), but is {request.max_restarts}"
        )
    if not is_restart() and path not in ("none", "auto") and not os.path.exists(path):
        raise ValueError(f"`resume` must be none, auto or the path of a checkpoint, but {path!r} does not exist")
