"""The checkpoint part of the strategy: all ranks write their shards in our format; any layout can read them."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ...checkpoint import (
    CheckpointError,
    CheckpointMetadata,
    CheckpointWriter,
    TensorEntry,
    check_model,
    divide_tensors,
    read_metadata,
    remove_checkpoint,
)
from ...checkpoint.model_tensors import model_shapes
from ...parallel import ParallelContext, padding_of
from ..runtime.lost_rank import abort_nccl
from .lightning_state import count_steps, from_json, loops_after, to_json

_NFS_DELAY_S = 60.0  # an NFS client keeps what it knows of a folder for up to `acdirmax`


def _appears(file: Path) -> bool:
    """Whether a file that another host has just written is there, or comes within `_NFS_DELAY_S`.

    Listing a folder makes an NFS client ask the server; otherwise it may trust its memory of what was missing.
    """
    deadline = time.monotonic() + _NFS_DELAY_S
    while True:
        with contextlib.suppress(OSError):
            os.listdir(file.parent.parent)
            if file.name in os.listdir(file.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


class ShardedCheckpointStrategy(DDPStrategy):
    """The part of `TensorParallelStrategy` in which ranks agree, and write and read checkpoints."""

    parallel: ParallelContext
    writer: CheckpointWriter | None = None
    control_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None  # the ranks of this host, if votes are counted per host
    leader_group: dist.ProcessGroup | None = None  # the first rank of each host

    def on_exception(self, exception: BaseException) -> None:
        """Abandon collectives before Lightning frees the GPU's memory, which would wait for those of a rank that is
        gone."""
        super().on_exception(exception)
        if self.world_size > 1 and not isinstance(exception, CheckpointError):  # which nearly always every rank raises
            abort_nccl()

    def any_rank(self, *decisions: bool) -> list[bool]:
        """For each decision, whether any rank says yes; the same on all ranks.

        A rank that is gone ends the vote on its host, and the missing leader that of the others.

        Communicates:
            on one host, an all-reduce over the world. On several, an all-reduce over the ranks of each host, one over
            the first ranks of the hosts, and a broadcast on each host: gloo sends 2 (P - 1) messages one after the
            other for an all-reduce over P ranks.
        """
        if self.world_size == 1:
            return list(decisions)
        votes = torch.tensor([int(decision) for decision in decisions])
        if self.host_group is None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control_group)
        else:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.host_group)
            if self.local_rank == 0:
                dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.leader_group)
            dist.broadcast(votes, src=self.global_rank - self.local_rank, group=self.host_group)
        return [bool(vote) for vote in votes.tolist()]

    def agree(self, action: Callable[[], Any], first_rank_only: bool = False) -> Any:
        """Return this rank's `action()`; if it fails on any rank, raise the error of the lowest such rank on all ranks.

        Args:
            first_rank_only: the other ranks do nothing and return None.

        Raises:
            CheckpointError: also of any other ValueError or OSError of `action`.

        Communicates:
            one small object per rank over the world, between the hosts.
        """
        result = error = None
        try:
            if self.is_global_zero or not first_rank_only:
                result = action()
        except (OSError, ValueError) as problem:
            error = problem
        error = next((each for each in self.gather(error) if each is not None), None)
        if error is not None:
            raise error if isinstance(error, CheckpointError) else CheckpointError(str(error))
        return result

    def gather(self, item: Any) -> list[Any]:
        """Every rank's small item by rank, on all ranks.

        Communicates:
            one object per rank over the world, between the hosts.
        """
        items = [item] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(items, item, group=self.control_group)
        return items

    def check_shared(self, folder: Path) -> None:
        """Check that all ranks see what rank 0 writes into `folder`.

        Raises:
            CheckpointError: some rank does not; raised on all ranks.

        Communicates:
            one small object per rank over the world, twice.
        """
        note = folder / f".{self.writer.token}.shared"

        def look() -> None:
            if not _appears(note):
                problem = f"rank {self.global_rank} does not see {folder}"
                raise CheckpointError(f"{problem}: it must be on a file system that all ranks share")

        self.agree(note.touch, first_rank_only=True)
        try:
            self.agree(look)
        finally:
            if self.is_global_zero:
                note.unlink()

    def begin_save(
        self,
        path: Path,
        run: dict[str, Any],
        state: dict[str, Any],
        in_background: bool = False,
        on_complete: Callable[[Path], None] | None = None,
        weights_only: bool = False,
    ) -> None:
        """Start writing the state after the last step, on all ranks; returns when the tensors may change.

        Args:
            run: the run's configuration, kept with the checkpoint.
            state: what else the run needs to resume.
            on_complete: called on rank 0, in the saving thread, when the checkpoint is complete.
            weights_only: without moments and counters; for half types the fp32 masters, once training has started.
        """
        module, context = self.lightning_module, self.parallel
        optimizer = self.optimizers[0] if self.optimizers or not weights_only else None
        # Those of this rank's stage, but for the copy of a tied weight.
        own = {name: param for name, param in module.model.named_parameters() if param.shard.tie != "copy"}
        kinds = {"model": next(iter(own.values())).dtype} if optimizer is None else optimizer.kinds
        kinds = {kind: dtype for kind, dtype in kinds.items() if kind == "model" or not weights_only}

        def entries(shapes: dict[str, tuple[tuple[int, ...], int | None]]) -> dict[str, TensorEntry]:
            return {
                f"{kind}/{name}": TensorEntry(shape, dtype, shard_dim)
                for name, (shape, shard_dim) in shapes.items()
                for kind, dtype in kinds.items()
            }

        mine = entries({name: (param.shard.full_shape, param.shard.shard_dim) for name, param in own.items()})
        metadata = CheckpointMetadata(
            step=module.completed_steps,
            layout=self.layout.sizes,
            model=module.config.to_dict(),
            tensors=mine | entries(model_shapes(module.config) if context.pp_size > 1 else {}),
            files={},
            optimizer={} if weights_only else optimizer.state_dict(),
            run=run,
            state=state,
        )
        share = divide_tensors(mine, context, padding_of(module.model))
        if optimizer is None:
            tensors = {f"model/{name}": param for name, param in own.items()}
        else:
            tensors = optimizer.whole_tensors(share.places)
        self.writer.begin(path, tensors, metadata, share, in_background, on_complete, context.zero1)

    def finish_save(self) -> str | None:
        """Wait for the save in progress, on all ranks; returns None, or on every rank why it failed.

        Communicates:
            rank 0's result to the world.
        """
        return self.broadcast(self.writer.finish())

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Empty: `save_checkpoint` takes the tensors itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty, as above."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's `trainer.save_checkpoint`, in our format; loops and callbacks go into the metadata.

        Raises:
            CheckpointError: it could not be written; raised on all ranks.
        """
        checkpoint = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        weights_only = "lr_schedulers" not in checkpoint
        self.begin_save(Path(filepath), {}, {"lightning": to_json(checkpoint)}, weights_only=weights_only)
        error = self.finish_save()
        if error is not None:
            raise CheckpointError(error)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning needs to resume after a checkpoint's step; the tensors are read later, in place.

        Raises:
            CheckpointError: it is missing, damaged or of another model.
        """
        metadata = read_metadata(checkpoint_path)
        check_model(metadata, self.lightning_module.config, checkpoint_path)
        if "lightning" in metadata.state:
            found = from_json(metadata.state["lightning"])
            count_steps(found["loops"]["fit_loop"])
        else:
            found = self._lightning_state_of_run(metadata)
        if metadata.optimizer:
            found["optimizer_states"] = [{"path": checkpoint_path, "counters": metadata.optimizer}]
        return found | {"state_dict": {}, "path": checkpoint_path}

    def _lightning_state_of_run(self, metadata: CheckpointMetadata) -> dict[str, Any]:
        """The same for a checkpoint of `src/train.py`, which has no Lightning state."""
        trainer = self.lightning_module.trainer
        others = "validate_loop", "test_loop", "predict_loop"
        loops = {name: getattr(trainer, name).state_dict() for name in others}
        found = {
            "pytorch-lightning_version": L.__version__,
            "epoch": 0,
            "global_step": metadata.step,
            "loops": loops | {"fit_loop": loops_after(trainer.fit_loop.state_dict(), metadata.step)},
            "callbacks": {},
            "lr_schedulers": [{}],
            "lmscale": metadata.state,
        }
        if trainer.datamodule is not None:
            state = {"global_batch_size": metadata.run["global_batch_size"]}
            found[type(trainer.datamodule).__qualname__] = state
        return found

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Read the weights in place, unless `configure_model` has."""
        if self.lightning_module.weights_from != checkpoint["path"]:
            self.lightning_module.read_weights(checkpoint["path"])

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Read masters and moments in place."""
        state, optimizer = checkpoint["optimizer_states"][0], self.optimizers[0]
        with self.lightning_module.reading(state["path"]) as read_into:
            if self.lightning_module.weights_from != state["path"]:
                optimizer.load_masters(read_into)
            optimizer.load_moments(state["counters"], read_into)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint directory (rank 0 does)."""
        if self.is_global_zero:
            remove_checkpoint(filepath)
