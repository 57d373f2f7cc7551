"""A job on one rank: the Trainer, the process group, the run folder, the watchdog, signals, and the exit code."""

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from ..checkpoint import CheckpointError
from ..config import Layout
from ..config.finetune import FinetuneConfig
from ..config.pretrain import RunConfig
from ..parallel.shared_memory import SharedMemoryError
from ..runtime import world as outside
from ..runtime.accelerator import keep_partial_sums_in_fp32
from ..runtime.cpu_settings import keep_heap, share_cores
from ..runtime.exit_codes import DONE, USER_ERROR
from ..runtime.interruption import Interruption
from ..runtime.lost_rank import abort_nccl, end_if_lost
from ..runtime.ranks import AgreedError
from ..runtime.run_lock import RunLock
from ..runtime.watchdog import Watchdog
from ..runtime.world import join_ranks, world_from_outside
from .strategy import TensorParallelStrategy

# Silence Lightning's notes on devices, tips and rank numbers, and two warnings that do not apply: one about its own use
# of a torch function, and one about loaders that cannot resume (ours starts after the completed steps).
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")


class Ending:
    """The exit code of a run, decided equally on every rank; a callback that stops the run sets it."""

    def __init__(self) -> None:
        self.exit_code = DONE

    def stop(self, trainer: L.Trainer, exit_code: int) -> None:
        """Stop the training after this step; Lightning's `should_stop` would validate once more."""
        self.exit_code = exit_code
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


@dataclass(frozen=True)
class RankSession:
    """A job that runs on this rank.

    Args:
        folder: the run folder, the same on all ranks and locked for this job.
        num_threads: CPU threads of this rank.
        started: when the folder was locked, seconds since the epoch.
    """

    trainer: L.Trainer
    folder: Path
    watchdog: Watchdog
    interruption: Interruption
    ending: Ending
    num_threads: int
    started: float = field(default_factory=time.time)

    @property
    def strategy(self) -> TensorParallelStrategy:
        """The Trainer's, whose process group has started."""
        return self.trainer.strategy

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run folder."""
        return self.trainer.is_global_zero


def new_trainer(
    request: RunConfig | FinetuneConfig, layout: Layout, accelerator: Literal["cpu", "gpu"], **options: Any
) -> L.Trainer:
    """Return Lightning's Trainer for a run, with its `TensorParallelStrategy` on the ranks that have been started.

    Args:
        options: of `L.Trainer`, in addition to those that every run has.
    """
    world = join_ranks()
    torch.set_float32_matmul_precision(request.trainer.matmul_precision)
    keep_partial_sums_in_fp32()
    strategy = TensorParallelStrategy(
        layout, timeout_minutes=request.parallel.timeout_minutes, shared_memory=request.parallel.shared_memory
    )
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=world.local_size,
        num_nodes=world.num_hosts,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_epochs=-1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    # Lightning's handler for SIGTERM talks to the other ranks, wherever they happen to be. It also broadcasts a number
    # before every step to hear of the signal; with `Interruption` the ranks agree when they agree on checkpoints.
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def run_on_this_rank(
    request: RunConfig | FinetuneConfig,
    trainer: L.Trainer,
    train: Callable[[RankSession], int],
    stops_on_signal: bool = True,
) -> int:
    """Start the process group, lock the run folder, and call `train`; clean up however it ends.

    Args:
        train: the job itself; returns an exit code.
        stops_on_signal: SIGTERM and SIGUSR1 are recorded for `train` instead of ending the process.

    Returns:
        the exit code, the same on all ranks; `USER_ERROR`, after one line from rank 0, if a checkpoint, the run
        folder or shared memory cannot be used, or a GPU has too little free memory.

    Raises:
        LostRank: another rank has died or a collective has failed; this one has printed a line.
    """
    strategy, on_gpu = trainer.strategy, trainer.strategy.root_device.type == "cuda"
    interruption, lock = Interruption(), RunLock()
    watchdog = Watchdog(trainer.global_rank, 60 * request.parallel.timeout_minutes)
    watchdog.start()
    try:
        strategy.setup_environment()
        if stops_on_signal:  # until now a signal ends this rank, which may be waiting for others
            interruption.install()
        num_threads, reason = share_cores(request.trainer.num_threads)  # after Lightning's own
        if not on_gpu:
            keep_heap()
        folder = strategy.ranks.broadcast(Path(request.run_dir))  # under torchrun each rank has computed its own
        strategy.ranks.agree(partial(lock.take, folder), first_rank_only=True)
        watchdog.folder = folder
        world = world_from_outside()
        if trainer.is_global_zero and world is not None and world.restarts:
            print(f"restart {world.restarts} of {world.max_restarts} after a failure", flush=True)
        if trainer.is_global_zero:
            print(f"CPU threads per rank: {num_threads} ({reason})", flush=True)
        code = train(RankSession(trainer, folder, watchdog, interruption, Ending(), num_threads))
        # A rank that a signal met too late for this job would leave the others alone in the next one of a sweep.
        (outside.asked_to_stop,) = strategy.ranks.any(outside.asked_to_stop)
        return code
    except (AgreedError, CheckpointError, SharedMemoryError) as error:  # the same on every rank
        if trainer.is_global_zero:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except RuntimeError as error:
        end_if_lost(error, trainer.global_rank, strategy.layout.tp_size, watchdog.where, watchdog.folder)
        raise
    finally:
        interruption.restore()
        lock.release()
        watchdog.mark("the end of the process group")
        _end_process_group(failed=sys.exc_info()[0] is not None)
        watchdog.stop()
        gc.collect()  # frees memory for the next job of a sweep in this process
        if on_gpu:
            torch.cuda.empty_cache()


def _end_process_group(failed: bool) -> None:
    """Leave the process group, after a failure without waiting for ranks that may be inside a collective."""
    if dist.is_initialized() and not (failed and abort_nccl()):
        dist.destroy_process_group()
