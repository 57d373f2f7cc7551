"""The ranks of an evaluation: their process group, and errors that all of them raise together."""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ..checkpoint import CheckpointError
from ..config import Layout
from ..launcher import World, world_from_outside
from ..parallel import ParallelContext, make_context
from ..threads import share_cores

USER_ERROR = 2  # exit code of a rank for an error that the user must correct, as in cli/errors.py
TIMEOUT = timedelta(minutes=30)  # of a collective: a rank that waits longer fails
T = TypeVar("T")


def run_on_rank(work: Callable[[ParallelContext, torch.device], int], accelerator: str, layout: Layout) -> int:
    """Run `work` on this rank's device.

    Returns:
        its exit code, or with several ranks `USER_ERROR`, after the error message.

    Raises:
        ValueError: raised by `work` with one rank.
    """
    share_cores()
    use_gpu = accelerator != "cpu" and torch.cuda.is_available()
    context = evaluation_groups(layout, "cuda" if use_gpu else "cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
    if layout.world_size == 1:
        return work(context, device)
    try:
        code = work(context, device)
    except ValueError as error:  # raised on every rank
        if context.tp_rank == context.dp_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = USER_ERROR
    # Not after another exception: with NCCL it would wait for ranks that are inside a collective.
    dist.destroy_process_group()
    return code


def evaluation_groups(layout: Layout, device_type: str = "cpu") -> ParallelContext:
    """Create this rank's parallel context; with several ranks, join the process group of the environment.

    Args:
        device_type: `cuda` uses the GPU of the local rank and nccl, `cpu` uses gloo.

    Raises:
        ValueError: the number of ranks that were started is not the layout's, or a rank does not see the GPUs of
            its node's ranks.

    Communicates:
        as `make_context`.
    """
    world = world_from_outside() or World()
    if world.size != layout.world_size:
        grid = f"a grid of the {world.size} ranks that were started"
        raise ValueError(f"`parallel` must be {grid}, but is one of {layout.world_size}")
    if device_type == "cuda":
        world.check_gpus(torch.cuda.device_count())
        torch.cuda.set_device(world.local_rank)
    if world.size == 1:
        return ParallelContext()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    return make_context(layout.axes, device_type, TIMEOUT, pad_heads=layout.pad_heads)


def agree(action: Callable[[], T], context: ParallelContext) -> T:
    """Run `action()` on every rank; if it fails on any, raise the error of the lowest such rank on all ranks.

    Raises:
        CheckpointError: `action` has raised a ValueError or an OSError on some rank.

    Communicates:
        all-gathers of one short text over all ranks.
    """
    result, problem = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = f"{error}"
    problem = next((text for text in gather(problem, context) if text is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    return result


def gather(item: T, context: ParallelContext) -> list[T]:
    """All-gather a small item; returns those of all ranks, ordered by rank.

    Communicates:
        one object per rank over the world.
    """
    items = [item] * (context.tp_size * context.dp_size)
    if len(items) > 1:
        dist.all_gather_object(items, item)
    return items
