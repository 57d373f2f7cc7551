"""Checkpoints of a strategy whose ranks hold shards: our format, written by all ranks and read at any layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

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
from ..data.certificate import digest_number
from ..parallel import ParallelContext


class ShardedCheckpointStrategy(DDPStrategy):
    """The part of `TensorParallelStrategy` that writes and reads checkpoints; the ranks meet in the file system."""

    parallel: ParallelContext
    writer: CheckpointWriter | None = None

    def check_shared(self, folder: Path) -> None:
        """The ranks meet in `folder`, so all must see what rank 0 writes there.

        Raises:
            CheckpointError: some rank does not, on all ranks.

        Communicates:
            one short text per rank over the world, twice.
        """
        note = folder / f".{self.writer.token}.shared"
        if self.is_global_zero:
            note.touch()
        self.first_error(None)
        missing = None if note.exists() else f"rank {self.global_rank} does not see {folder}: it must be on a file "
        missing = self.first_error(missing and missing + "system that all ranks share")
        if self.is_global_zero:
            note.unlink()
        if missing is not None:
            raise CheckpointError(missing)

    def begin_save(
        self,
        path: Path,
        run: dict[str, Any],
        state: dict[str, Any],
        in_background: bool = False,
        on_complete: Callable[[Path], None] | None = None,
    ) -> None:
        """All ranks together: begin to write the state after the last step; the tensors may then change.

        Args:
            run: the run's configuration, kept with the checkpoint.
            state: what else the run needs to go on.
            on_complete: called on rank 0, in the saving thread, when the checkpoint is complete.
        """
        module, context = self.lightning_module, self.parallel
        optimizer = self.optimizers[0]
        optimizer_state = optimizer.state_dict()
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
            optimizer=optimizer_state["counters"],
            run=run,
            state=state,
        )
        share = divide_tensors(entries, context.tp_rank, context.tp_size, context.dp_rank, context.dp_size, owners)
        self.writer.begin(path, optimizer_state["tensors"], metadata, share, in_background, on_complete)

    def finish_save(self) -> str | None:
        """All ranks together: wait for the save that was begun; None, or why it failed, on every rank.

        Communicates:
            rank 0's answer to the world.
        """
        return self.broadcast(self.writer.finish())

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
