"""The Lightning strategy that builds the (data, tensor) grid of ranks."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..checkpoint import (
    CheckpointError,
    CheckpointMetadata,
    CheckpointReader,
    CheckpointWriter,
    TensorEntry,
    divide_tensors,
    read_metadata,
    remove_checkpoint,
)
from ..config import ParallelConfig
from ..data.data_digest import digest_number
from ..parallel import ParallelContext, choose_communicator

# Collectives outlive the watchdog by this, so that it is the watchdog who says where the rank stood.
_GRACE = timedelta(minutes=1)


class TensorParallelStrategy(DDPStrategy):
    """Data parallelism over groups of tensor-parallel ranks (Figure 8).

    The module builds its own shard in `configure_model`, from `strategy.parallel`. Gradients of fp32 and fp64 are
    averaged by torch's DDP over the data group alone; those of half types, and with `zero1` all, are summed there by
    the optimizer. Everything inside a tensor group is the model's business.

    With 8 ranks and tp_size 2: tensor groups [0, 1], [2, 3], [4, 5], [6, 7]; data groups [0, 2, 4, 6], [1, 3, 5, 7].

    Args:
        layout: sizes of the grid; their product must be the world size.
        timeout_minutes: how long a collective may wait before the run fails.
        shared_memory: tensor ranks on one host without a GPU communicate through memory they share.

    Raises:
        ValueError: the world size is not tp_size x dp_size.

    Source: section 3, appendix B.1.
    """

    def __init__(
        self, layout: ParallelConfig, timeout_minutes: float = 30.0, shared_memory: bool = True, **kwargs: Any
    ) -> None:
        self.patience = timedelta(minutes=timeout_minutes) + _GRACE
        super().__init__(
            timeout=self.patience,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            **kwargs,
        )
        self.layout, self.shared_memory = layout, shared_memory
        self.parallel = ParallelContext()
        self.save_timeout_s = 60 * timeout_minutes
        self.control_group: dist.ProcessGroup | None = None
        self.writer: CheckpointWriter | None = None

    def setup_distributed(self) -> None:
        """Start the process group. One process needs no port for it, which another could take before it is used."""
        if self.num_nodes * self.num_processes == 1 and not dist.is_initialized():
            backend, store = self._get_process_group_backend(), dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=self.patience)
        super().setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group, check the world, make the groups."""
        super().setup_environment()
        if self.world_size != self.layout.world_size:
            raise ValueError(
                f"the world size must be `tp_size` x `dp_size` ({self.layout.tp_size} x {self.layout.dp_size}), "
                f"but is {self.world_size}"
            )
        mesh = init_device_mesh(
            self.root_device.type,
            (self.layout.dp_size, self.layout.tp_size),
            mesh_dim_names=("data", "tensor"),
        )
        self.parallel = ParallelContext(
            tp_rank=mesh.get_local_rank("tensor"),
            tp_size=self.layout.tp_size,
            dp_rank=mesh.get_local_rank("data"),
            dp_size=self.layout.dp_size,
            tp_group=mesh.get_group("tensor"),
            dp_group=mesh.get_group("data"),
            tp_communicator=choose_communicator(mesh.get_group("tensor"), self.patience, self.shared_memory),
            sequence_parallel=self.layout.cuts_sequence,
            zero1=self.layout.cuts_optimizer,
        )
        # Without its own group DDP would overwrite every shard with rank 0's.
        self._ddp_kwargs["process_group"] = self.parallel.dp_group
        if self.root_device.type == "cuda":  # small decisions of the hosts do not wait for the devices
            self.control_group = dist.new_group(backend="gloo")
        token = self.broadcast(uuid.uuid4().hex[:8])
        self.writer = CheckpointWriter(token, self.global_rank, self.world_size, self.save_timeout_s)

    def setup(self, trainer: Any) -> None:
        """Move the shard to its device and, for training, wrap it in DDP over the data group and make the optimizer.

        DDPStrategy's own version broadcasts rank 0's weights over the world when it does not train, which would give
        every tensor rank the same shard.
        """
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            # Gradients of half types are summed over micro-batches and data ranks in fp32, by the optimizer, which with
            # `zero1` sums all of them.
            is_half = next(self.lightning_module.parameters()).dtype in (torch.float16, torch.bfloat16)
            if self.parallel.dp_size > 1 and not is_half and not self.parallel.zero1:
                self.configure_ddp()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Unwrap the module. Unlike Lightning's own, leave weights and optimizer where they are: a shard with its
        moments may not fit the host's memory, and nothing here needs it there."""
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.accelerator.teardown()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """A sampler deals over the data ranks; tensor ranks see the same samples."""
        return {"num_replicas": self.parallel.dp_size, "rank": self.parallel.dp_rank}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data group (tensor ranks hold equal values)."""
        return super().reduce(tensor, group=group or self.parallel.dp_group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over the world: every rank (`all`) or any rank says yes."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def any_rank(self, *decisions: bool) -> list[bool]:
        """For each decision, whether any rank says yes; the same answer everywhere.

        Communicates:
            one all-reduce over the world, between the hosts.
        """
        if self.world_size == 1:
            return list(decisions)
        votes = torch.tensor([int(decision) for decision in decisions])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control_group)
        return [bool(vote) for vote in votes.tolist()]

    def first_answer(self, answer: str | None) -> str | None:
        """The answer of the lowest rank that has one, the same everywhere; None where no rank has.

        Communicates:
            one short text a rank over the world, between the hosts.
        """
        return next((text for text in self.gather(answer) if text is not None), None)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's small item by rank, on all ranks.

        Communicates:
            one object a rank over the world, between the hosts.
        """
        items = [item] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(items, item, group=self.control_group)
        return items

    def check_shared(self, folder: Path) -> None:
        """The ranks meet in `folder`, so all must see what rank 0 writes there.

        Raises:
            CheckpointError: some rank does not, on all ranks.

        Communicates:
            one short text a rank over the world, twice.
        """
        note = folder / f".{self.writer.token}.shared"
        if self.is_global_zero:
            note.touch()
        self.first_answer(None)
        missing = None if note.exists() else f"rank {self.global_rank} does not see {folder}: it must be on a file "
        missing = self.first_answer(missing and missing + "system that all ranks share")
        if self.is_global_zero:
            note.unlink()
        if missing is not None:
            raise CheckpointError(missing)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """This rank's shard of the model by parameter name."""
        return dict(self.lightning_module.model.named_parameters())

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: `configure_model` has read the weights into their place."""

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Read the moments into their place."""
        path, counters = checkpoint["optimizer_states"][0]["path"], checkpoint["optimizer_states"][0]["counters"]
        with CheckpointReader(path) as reader:
            self.optimizers[0].load_moments(
                counters, lambda key, out: reader.read_into(key, out, self.parallel.tp_rank)
            )

    def begin_save(
        self, path: Path, in_background: bool = False, on_complete: Callable[[Path], None] | None = None
    ) -> None:
        """All ranks together: begin to write the state after the last step; the tensors may then change.

        Args:
            on_complete: called on rank 0, in the saving thread, when the checkpoint is complete.

        Communicates:
            one all-reduce of a number over the data group; the ranks then meet in the file system only.
        """
        module, context = self.lightning_module, self.parallel
        optimizer = self.optimizers[0]
        state = optimizer.state_dict()
        kinds = optimizer.dtypes if optimizer.num_updates else {"model": optimizer.dtypes["model"]}
        entries, owners = {}, {}
        for name, param in module.model.named_parameters():
            for kind, dtype in kinds.items():
                entries[f"{kind}/{name}"] = TensorEntry(param.shard.full_shape, dtype, param.shard.shard_dim)
                owners[f"{kind}/{name}"] = None if optimizer.owners is None else optimizer.owners[name]
        metadata = CheckpointMetadata(
            step=module.completed_steps,
            layout={"tp_size": context.tp_size, "dp_size": context.dp_size},
            model=module.config.to_dict(),
            tensors=entries,
            files={},
            optimizer=state["counters"],
            run=module.run.to_dict(),
            state=module.state_for_checkpoint(),
        )
        share = divide_tensors(entries, context.tp_rank, context.tp_size, context.dp_rank, context.dp_size, owners)
        self.writer.begin(path, state["tensors"], metadata, share, in_background, on_complete)

    def finish_save(self) -> str | None:
        """All ranks together: wait for the save that was begun; None, or why it failed, on every rank.

        Communicates:
            rank 0's answer to the world.
        """
        return self.broadcast(self.writer.finish())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's `trainer.save_checkpoint`: begin and finish. What Lightning collected is not needed.

        Raises:
            CheckpointError: it could not be written, on all ranks.
        """
        self.begin_save(Path(filepath))
        error = self.finish_save()
        if error is not None:
            raise CheckpointError(error)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning needs to go on after a checkpoint's step; the tensors are read later, into their place."""
        metadata = read_metadata(checkpoint_path)
        step, module = metadata.step, self.lightning_module
        return {
            "pytorch-lightning_version": L.__version__,
            "epoch": 0,
            "global_step": step,
            "state_dict": {},
            "loops": {"fit_loop": _progress_after(module.trainer.fit_loop.state_dict(), step)},
            "callbacks": {},
            "lr_schedulers": [],
            "optimizer_states": [{"path": checkpoint_path, "counters": metadata.optimizer}],
            "PretrainDataModule": {"consumed_samples": step * module.run.global_batch_size},
            "lmscale": {"step": step, "data_digest": digest_number(metadata.state["data_digest"])},
        }

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint directory (rank 0 does)."""
        if self.is_global_zero:
            remove_checkpoint(filepath)


def _progress_after(progress: dict[str, Any], step: int) -> dict[str, Any]:
    """Lightning's account of its loops as it stands in `on_train_batch_end` of a step.

    It is made from the step instead of stored, so a checkpoint neither depends on Lightning's version nor needs to have
    been written by Lightning at all.
    """
    progress["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1
    for count in ("total", "current"):
        batches = dict.fromkeys(("ready", "started", "processed"), step) | {"completed": step - 1}
        progress["epoch_loop.batch_progress"][count] = batches
        updates = {"ready": step, "completed": step}
        progress["epoch_loop.manual_optimization.optim_step_progress"][count] = updates
        progress["epoch_progress"][count] |= {"ready": 1, "started": 1}
    return progress
