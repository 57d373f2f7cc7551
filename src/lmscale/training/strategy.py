"""The Lightning strategy: the (data, pipeline, tensor) grid of ranks."""

import atexit
import contextlib
import os
import resource
import sys
import uuid
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ..checkpoint import CheckpointError, CheckpointWriter
from ..config import Layout
from ..config.checks import refuse
from ..parallel import ParallelContext, make_context
from ..parallel.rendezvous import start_process_group
from ..runtime.lost_rank import abort_nccl
from ..runtime.ranks import AgreedError, make_ranks
from .checkpoint_strategy import ShardedCheckpointStrategy
from .step.optimizer import MixedPrecisionAdamW
from .step.training_module import TrainingModule

# Collectives time out this much later than the watchdog, so that the watchdog reports what the rank was doing.
_GRACE = timedelta(minutes=1)
_ONE_RANK = Layout()
FULL_MESH = 16  # ranks


def prepare_connections(world_size: int) -> None:
    """Let gloo connect many ranks only as they communicate, NCCL all of a group at its start, and raise this process's
    limit of open files.

    Otherwise each group connects every rank with every other one: 511 sockets on each of 512, which was reported to
    fail above 60 nodes. Fewer keep the full mesh, over which the tests of lost ranks run.
    """
    if world_size > FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Otherwise NCCL takes the buffers of an algorithm at its first message of a size that it sends by this one, after
    # `check_free_memory`; no list of collectives reaches them all.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit, and refuses that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@cache
def _end_at_exit() -> None:
    """End the process group at exit, as Lightning does: NCCL warns of a group that is left."""
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _gather_metric(state: Tensor, group: Any, context: ParallelContext) -> list[Tensor]:
    """A metric's state on all data ranks; by default torchmetrics gathers also from tensor ranks, which have the same
    samples."""
    return gather_all_tensors(state, group or context.dp_group)


class TensorParallelStrategy(ShardedCheckpointStrategy):
    """Data parallelism over pipelines of tensor-parallel ranks (Figure 8).

    The module builds its own shard in `configure_model`, from `strategy.parallel`. The optimizer sums gradients over
    the data group, and the model itself communicates within the tensor group: torch's DDP wraps nothing. The base
    class gives the launcher, the process group, and the collectives of Lightning's own.

    With 8 ranks and tp_size 2: tensor groups [0, 1], [2, 3], [4, 5], [6, 7]; data groups [0, 2, 4, 6], [1, 3, 5, 7].

    Args:
        layout: divides the ranks; the Trainer's world size decides its `dp_size`.
        timeout_minutes: how long a collective may wait before the run fails.
        shared_memory: tensor ranks on one host without GPUs communicate through shared memory.
        **options: fields of `Layout`, in place of those of `layout`: `TensorParallelStrategy(tp_size=2)`.

    Raises:
        ValueError: `tp_size` does not divide the world size.

    Source: section 3, appendix B.1.
    """

    def __init__(
        self,
        layout: Layout = _ONE_RANK,
        *,
        timeout_minutes: float = 30.0,
        shared_memory: bool = True,
        **options: Any,
    ) -> None:
        self.collective_timeout = timedelta(minutes=timeout_minutes) + _GRACE
        super().__init__(timeout=self.collective_timeout)
        self.layout = replace(layout, **options)
        self.shared_memory = shared_memory
        self.parallel = ParallelContext()
        self._is_alone = self._has_failed = False
        # Of a start and of a save: what does not come is named before a watchdog ends the run.
        self.named_timeout = timedelta(minutes=0.9 * timeout_minutes)

    def connect(self, model: L.LightningModule) -> None:
        """Take the module to run.

        Raises:
            ValueError: it is not a `TrainingModule`: nothing would average its gradients over the data ranks, clip them
                by the norm of the whole model, or save its shards; or it optimizes by itself.
        """
        kind = type(model).__name__
        if not isinstance(model, TrainingModule):
            raise ValueError(
                "`module` must be a TrainingModule under TensorParallelStrategy (for any other LightningModule take "
                f'`strategy="ddp"`), but is a {kind}'
            )
        if not model.automatic_optimization:
            raise ValueError(f"`automatic_optimization` of {kind} must be True, but is False")
        super().connect(model)

    def _configure_launcher(self) -> None:
        """Use no launcher for one process, so that a notebook works too, nor for ranks that exist already.

        There it would start nothing, and only set its own number of CPU threads.

        Raises:
            ValueError: several ranks would have to be started from a notebook.
        """
        if self.num_nodes * self.num_processes > 1 and not self.cluster_environment.creates_processes_externally:
            if hasattr(sys, "ps1") or sys.flags.interactive:
                way_out = "save the code as a script and start it with python for more"
                refuse("devices", f"1 in a notebook or an interactive session ({way_out})", self.num_processes)
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Start the process group; one process uses an in-process store, without a port that may be taken."""
        prepare_connections(self.num_nodes * self.num_processes)
        is_new, world_size = not dist.is_initialized(), self.num_nodes * self.num_processes
        self._is_alone = is_new and world_size == 1
        if is_new:
            rank, address, place = 0, ("", 0), self.cluster_environment
            if not self._is_alone:
                self.set_world_ranks()
                rank, address = place.global_rank(), (place.main_address, place.main_port)
            # On a GPU its communicator starts at once.
            options = {"device_id": self.root_device} if self.root_device.type == "cuda" else {}
            backend = self._get_process_group_backend()
            timeouts = self.collective_timeout, self.named_timeout
            start_process_group(backend, address, rank, world_size, *timeouts, **options)
            _end_at_exit()
        super().setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group, check the world size, and create the groups in the first of a Trainer's calls."""
        super().setup_environment()
        if self.parallel.tp_group is None or self._is_alone:  # a single process ends its group with each call
            self._make_groups()
        token = self.ranks.broadcast(uuid.uuid4().hex[:8])
        self.writer = CheckpointWriter(token, self.global_rank, self.world_size, self.named_timeout.total_seconds())

    def _make_groups(self) -> None:
        """Make the groups of the grid; a later call of the Trainer uses the same, as the model's layers do.

        From a group that is bound to a device torch splits the others. A rank outside a new group must take part in
        that, even if the group is of gloo, so leaders and others would split different numbers of times and wait for
        ever; and the second default group of a process crashes in a split (pytorch issue 192109).
        """
        dist.distributed_c10d._get_default_group().bound_device_id = None
        self.layout = self.layout.over(self.world_size)
        device_type, timeout = self.root_device.type, self.collective_timeout
        self.parallel = make_context(self.layout, device_type, timeout, self.shared_memory)
        self.ranks = make_ranks(self.num_processes, timeout, device_type == "cuda")

    def setup(self, trainer: Any) -> None:
        """Move the shard to its device, let metrics count the data ranks and, for training, create the optimizer.

        DDPStrategy's own version would give every tensor rank the shard of rank 0.
        """
        self.accelerator.setup(trainer)
        self.model_to_device()
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric):
                given = metric.dist_sync_fn
                if given is None or getattr(given, "func", None) is _gather_metric:  # of a Trainer before
                    metric.dist_sync_fn = partial(_gather_metric, context=self.parallel)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Create the optimizer.

        Raises:
            ValueError: `configure_optimizers` of a subclass returns another one.
        """
        super().setup_optimizers(trainer)
        optimizer = self.optimizers[0]  # Lightning refuses several
        if not isinstance(optimizer, MixedPrecisionAdamW):
            raise ValueError(
                "`configure_optimizers` must return the optimizer of `super().configure_optimizers()` (whose schedule "
                f"may be replaced), but returns {type(optimizer).__name__.lstrip('_')}"
            )

    def on_train_start(self) -> None:
        """Let the masters be what callbacks and the module have written into the weights, in hooks before this one."""
        super().on_train_start()
        self.optimizers[0].take_weights()

    def on_exception(self, exception: BaseException) -> None:
        """Abandon collectives before Lightning frees the GPU's memory, which would wait for those of a rank that is
        gone."""
        super().on_exception(exception)
        self._has_failed = True
        # Nearly always every rank raises these.
        if self.world_size > 1 and not isinstance(exception, AgreedError | CheckpointError):
            abort_nccl()

    def teardown(self) -> None:
        """Wait for weights that are on their way, and leave weights and optimizer on the device, unlike DDPStrategy: a
        shard with its moments may not fit into the host's memory."""
        # After an exception the rank that would send them may be gone, and `on_exception` may have ended NCCL.
        with contextlib.suppress(*[RuntimeError] * self._has_failed):
            for optimizer in self.optimizers if dist.is_initialized() else ():
                if isinstance(optimizer, MixedPrecisionAdamW):
                    optimizer.buffer.wait_for_weights()
        self._has_failed = False
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        if self._is_alone:  # the next Trainer of this process may use another layout
            dist.destroy_process_group()
            self._is_alone = False  # Lightning calls this also where it refuses its next call before it starts

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Samplers divide samples over the data ranks; the tensor ranks of a group see the same samples."""
        return {"num_replicas": self.parallel.dp_size, "rank": self.parallel.dp_rank}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data group (tensor ranks hold equal values)."""
        return super().reduce(tensor, group=group or self.parallel.dp_group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (`all`) or any rank decides yes, the same on all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)
