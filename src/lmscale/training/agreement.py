"""What only the ranks of a run can decide, together: the checkpoint and its schedule, the kernels, recomputation."""

from dataclasses import replace
from functools import partial

import torch

from ..models.attention_backend import fastest_backend
from .resuming import agree_on_checkpoint, check_resumable
from .run import Run, Start
from .session import RankSession
from .step.training_module import DTYPES
from .strategy import TensorParallelStrategy


def agree(run: Run, session: RankSession) -> Run:
    """Decide what `resolve` has left open, equally on all ranks, with the run folder locked.

    Raises:
        AgreedError: the run does not fit the checkpoint, or cannot read it.
        CheckpointError: on every rank, the checkpoint is of another model.

    Communicates:
        as `agree_on_checkpoint`, and a few small objects over the world.
    """
    session.watchdog.mark("the check of the checkpoint")
    start = agree_on_start(run, session)
    session.watchdog.mark("the choice of kernels")
    return agree_on_kernels(replace(run, start=start), session.strategy)


def agree_on_start(run: Run, session: RankSession) -> Start:
    """Choose the checkpoint, and check that the run fits it.

    The command has done both, but until the lock another job may have written checkpoints; and a restart goes on from
    the run's own.
    """
    request, ranks = run.request, session.strategy.ranks
    checkpoint = agree_on_checkpoint(request, session.folder, ranks)
    start = Start.at(checkpoint, request, session.folder)
    if checkpoint is not None:
        checkpoint.check_model(run.model)
    if not start.resumes:
        return start
    check = partial(check_resumable, request, run.corpus.content_hash, checkpoint, run.teacher)
    optimizer, schedule = ranks.broadcast(ranks.agree(check, first_rank_only=True))  # rank 0 looks for a record
    return replace(start, optimizer=optimizer, schedule=schedule)


def agree_on_kernels(run: Run, strategy: TensorParallelStrategy) -> Run:
    """The run with the kernels of rank 0, which measures the attention where that is to be measured.

    With `model.recompute=auto` ranks on GPUs of different sizes would choose different modes, and then deadlock.

    Ranks that were started again continue with the attention of the run's own checkpoint, if a GPU wrote it. What
    earlier jobs of the process compiled is forgotten: torch.compile does not see the order of attention backends, and
    keeps a limited number of graphs of one function.

    Communicates:
        one small object from rank 0 to the world.
    """
    model = run.model
    if run.measures_attention:
        kept = run.start.kept(on_gpu=True)
        if kept is not None:
            model = replace(model, attention=kept.model["attention"])
        elif strategy.is_global_zero:
            dtype, length = DTYPES[run.request.precision.dtype], run.request.data.seq_length
            sizes = run.layout.tp_size, run.request.micro_batch_size, length
            model = replace(model, attention=fastest_backend(model, *sizes, dtype, strategy.root_device))
    kernels, attention, recompute = strategy.ranks.broadcast((run.kernels, model.attention, model.recompute))
    if kernels.compiles:
        torch.compiler.reset()
    model = replace(model, attention=attention, recompute=recompute)
    return replace(run, model=model, kernels=kernels, measures_attention=False)
