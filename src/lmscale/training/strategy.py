"""The Lightning strategy: the (data, pipeline, tensor) grid of ranks."""

import contextlib
import os
import resource
import sys
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from ..checkpoint import CheckpointWriter
from ..config import Layout
from ..parallel import ParallelContext, make_context
from .checkpoints.sharded_strategy import ShardedCheckpointStrategy

# Collectives time out this much later than the watchdog, so that the watchdog reports what the rank was doing.
_GRACE = timedelta(minutes=1)
_ONE_RANK = Layout()
FULL_MESH = 16  # ranks


def prepare_connections(world_size: int) -> None:
    """Let gloo connect many ranks only as they communicate, and raise this process's limit of open files.

    Otherwise each group connects every rank with every other one: 511 sockets on each of 512, which was reported to
    fail above 60 nodes. Fewer keep the full mesh, over which the tests of lost ranks run.
    """
    if world_size > FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit, and refuses that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
        self.save_timeout_s = 0.9 * 60 * timeout_minutes  # rank 0 names the rank before a watchdog ends the run

    def _configure_launcher(self) -> None:
        """Use no launcher for one process, so that a notebook works too, nor for ranks that exist already.

        There it would start nothing, and only set its own number of CPU threads.

        Raises:
            ValueError: several ranks would have to be started from a notebook.
        """
        if self.num_nodes * self.num_processes > 1 and not self.cluster_environment.creates_processes_externally:
            if hasattr(sys, "ps1") or sys.flags.interactive:
                raise ValueError(
                    "`devices` must be 1 in a notebook or an interactive session (save the code as a script and start "
                    f"it with python for more), but is {self.num_processes}"
                )
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Start the process group; one process uses an in-process store, without a port that may be taken."""
        prepare_connections(self.num_nodes * self.num_processes)
        self._is_alone = self.num_nodes * self.num_processes == 1 and not dist.is_initialized()
        if self._is_alone:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": self.collective_timeout}
            if self.root_device.type == "cuda":  # as Lightning does for several; without it every barrier warns
                options["device_id"] = self.root_device
            dist.init_process_group(self._get_process_group_backend(), **options)
        super().setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group, check the world size, and create the groups in the first of a Trainer's calls."""
        super().setup_environment()
        if self.parallel.tp_group is None or self._is_alone:  # a single process ends its group with each call
            self._make_groups()
        token = self.broadcast(uuid.uuid4().hex[:8])
        self.writer = CheckpointWriter(token, self.global_rank, self.world_size, self.save_timeout_s)

    def _make_groups(self) -> None:
        """Make the groups of the grid; a later call of the Trainer uses the same, as the model's layers do."""
        self.layout = self.layout.over(self.world_size)
        self.parallel = make_context(
            self.layout.axes,
            self.root_device.type,
            self.collective_timeout,
            self.shared_memory,
            sequence_parallel=self.layout.cuts_sequence,
            zero1=self.layout.cuts_optimizer,
            batch_halves=self.layout.cuts_batch,
            pad_heads=self.layout.pad_heads,
        )
        if self.root_device.type == "cuda":  # small decisions of the hosts need not wait for the GPUs
            self.control_group = dist.new_group(backend="gloo", timeout=self.collective_timeout)
        if self.num_nodes > 1 < self.num_processes:
            self.make_host_groups(self.num_processes)

    def make_host_groups(self, local_size: int) -> None:
        """Make the groups of `any_rank`, for hosts of `local_size` ranks each."""
        hosts = [list(range(first, first + local_size)) for first in range(0, self.world_size, local_size)]
        options = {"backend": "gloo", "timeout": self.collective_timeout}
        self.host_group, _ = dist.new_subgroups_by_enumeration(hosts, **options)
        self.leader_group = dist.new_group([ranks[0] for ranks in hosts], **options)

    def setup(self, trainer: Any) -> None:
        """Move the shard to its device and, for training, create the optimizer.

        DDPStrategy's own version would give every tensor rank the shard of rank 0.
        """
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Leave weights and optimizer on the device, unlike DDPStrategy: a shard with its moments may not fit into the
        host's memory."""
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        if self._is_alone:  # the next Trainer of this process may use another layout
            dist.destroy_process_group()

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
