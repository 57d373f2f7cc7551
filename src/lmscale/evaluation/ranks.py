"""The ranks of an evaluation: their process group, and where each does its work."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..config import Layout
from ..parallel import ParallelContext, make_context
from ..parallel.rendezvous import start_process_group
from ..parallel.shared_memory import SharedMemoryError
from ..runtime.cpu_settings import share_cores
from ..runtime.exit_codes import USER_ERROR
from ..runtime.lost_rank import end_if_lost
from ..runtime.messages import print_error
from ..runtime.ranks import Ranks, make_ranks
from ..runtime.watchdog import Watchdog
from ..runtime.world import World, world_from_outside

TIMEOUT = timedelta(minutes=30)  # of a collective: a rank that waits longer fails


@dataclass(frozen=True)
class RankPlace:
    """Where the work of this rank is done.

    Args:
        watchdog: to be marked at least every `TIMEOUT`; it runs only beside other ranks.
    """

    context: ParallelContext
    ranks: Ranks
    device: torch.device
    watchdog: Watchdog


def run_on_rank(work: Callable[[RankPlace], int], accelerator: str, layout: Layout) -> int:
    """Run `work` on this rank's device.

    Returns:
        its exit code, or with several ranks `USER_ERROR`, after the error message.

    Raises:
        ValueError: raised by `work` with one rank.
        LostRank: another rank has died or a collective has failed; this one has printed a line.
    """
    share_cores()
    use_gpu = accelerator != "cpu" and torch.cuda.is_available()
    rank, place = (world_from_outside() or World()).rank, None
    watchdog = Watchdog(rank, TIMEOUT.total_seconds(), f"{TIMEOUT.total_seconds() / 60:.0f} minutes")
    if layout.world_size > 1:
        watchdog.start()
    try:
        context, ranks = evaluation_groups(layout, "cuda" if use_gpu else "cpu")
        device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
        place = RankPlace(context, ranks, device, watchdog)
        code = work(place)
    except (ValueError, SharedMemoryError) as error:  # of the work on every rank
        if layout.world_size == 1 or (place is None and isinstance(error, ValueError)):
            raise
        if rank == 0:
            print_error(error)
        code = USER_ERROR
    except RuntimeError as error:
        end_if_lost(error, rank, layout.tp_size, watchdog.where, None)
        raise
    finally:
        watchdog.stop()
    # Not after another exception: with NCCL it would wait for ranks that are inside a collective.
    if layout.world_size > 1:
        dist.destroy_process_group()
    return code


def evaluation_groups(layout: Layout, device_type: str = "cpu") -> tuple[ParallelContext, Ranks]:
    """Create this rank's context and `Ranks`; with several ranks, join the process group of the environment.

    Args:
        device_type: `cuda` uses the GPU of the local rank and nccl, `cpu` uses gloo.

    Raises:
        ValueError: the number of ranks that were started is not the layout's, or a rank does not see the GPUs of
            its node's ranks.

    Communicates:
        as `make_context` and `make_ranks`.
    """
    world = world_from_outside() or World()
    if world.size != layout.world_size:
        grid = f"a grid of the {world.size} ranks that were started"
        raise ValueError(f"`parallel` must be {grid}, but is one of {layout.world_size}")
    if device_type == "cuda":
        world.check_gpus(torch.cuda.device_count())
        torch.cuda.set_device(world.local_rank)
    if world.size == 1:
        return ParallelContext(), Ranks()
    if not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        start_process_group(backend, world.address, world.rank, world.size, TIMEOUT, TIMEOUT)
    context = make_context(layout, device_type, TIMEOUT)
    return context, make_ranks(world.local_size, TIMEOUT, device_type == "cuda")
