"""The checkpoint part of the strategy: all ranks write their shards in our format; any layout can read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..checkpoint import (
    Checkpoint,
    CheckpointMetadata,
    CheckpointWriter,
    TensorEntry,
    divide_tensors,
    remove_checkpoint,
)
from ..checkpoint.model_tensors import model_shapes
from ..parallel import ParallelContext, padding_of
from ..runtime.ranks import AgreedError, Ranks
from .lightning_state import count_steps, from_json, loops_after, to_json
from .step.learning_rate import UpdateSchedule

_RATES = ("lr", "betas")  # what torch's schedules change


class ShardedCheckpointStrategy(DDPStrategy):
    """The part of `TensorParallelStrategy` in which ranks write and read checkpoints."""

    parallel: ParallelContext
    writer: CheckpointWriter | None = None
    ranks = Ranks()

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
            model={} if module.config is None else module.config.to_dict(),
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
        return self.ranks.broadcast(self.writer.finish())

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Empty: `save_checkpoint` takes the tensors itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty, as above."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's `trainer.save_checkpoint`, in our format; loops and callbacks go into the metadata.

        Without an optimizer, as after `validate`, it has only weights.

        Raises:
            AgreedError: it could not be written.
        """
        if self.lightning_module.model is None:  # `OnExceptionCheckpoint` saves also where the run is refused
            rank_zero_warn(f"{filepath} is not written: the model is not built yet")
            return
        checkpoint = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        weights_only = "lr_schedulers" not in checkpoint or not self.optimizers
        if not weights_only:  # torch's schedules go on from these
            checkpoint["rates"] = [{key: group[key] for key in _RATES} for group in self.optimizers[0].param_groups]
        self.begin_save(Path(filepath), {}, {"lightning": to_json(checkpoint)}, weights_only=weights_only)
        error = self.finish_save()
        if error is not None:
            raise AgreedError(error)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning needs to resume after a checkpoint's step; the tensors are read later, in place.

        Args:
            checkpoint_path: `ckpt_path` of the Trainer's call, which may be a `Checkpoint`.

        Raises:
            CheckpointError: it is missing, damaged or of another model.
        """
        is_open = isinstance(checkpoint_path, Checkpoint)
        checkpoint = checkpoint_path if is_open else Checkpoint.open(checkpoint_path)
        metadata = checkpoint.metadata
        if self.lightning_module.config is not None:
            checkpoint.check_model(self.lightning_module.config)
        if "lightning" in metadata.state:
            found = from_json(metadata.state["lightning"])
            count_steps(found["loops"]["fit_loop"])
        else:
            found = self._lightning_state_of_run(metadata)
        if metadata.optimizer:
            found["optimizer_states"] = [metadata.optimizer]
        return found | {"state_dict": {}, "checkpoint": checkpoint}

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
        """Restore the number of steps, and read the weights in place, unless `configure_model` has."""
        self.lightning_module.completed_steps = checkpoint["global_step"]
        if self.lightning_module.weights_from is not checkpoint["checkpoint"]:
            self.lightning_module.read_weights(checkpoint["checkpoint"])

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Read masters and moments in place; with a schedule of torch's also the rates, from which it goes on."""
        saved, optimizer = checkpoint["checkpoint"], self.optimizers[0]
        with self.lightning_module.reading(saved) as read_into:
            if self.lightning_module.weights_from is not saved:
                optimizer.load_masters(read_into)
            optimizer.load_moments(saved.metadata.optimizer, read_into)
        if "rates" in checkpoint and not isinstance(self.lightning_module.lr_schedulers(), UpdateSchedule):
            for group, rates in zip(optimizer.param_groups, checkpoint["rates"], strict=True):
                group |= rates

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint directory, if it is there (rank 0 does)."""
        if self.is_global_zero and Path(filepath).exists():  # `OnExceptionCheckpoint` asks for it in any case
            remove_checkpoint(filepath)
