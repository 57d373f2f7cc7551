"""Check the settings of a user's Lightning Trainer before anything is built, and the batches of a user's loader."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from ...config.checks import refuse
from ...config.family import BUILT_IN
from ...data.datamodule import check_strategy
from ...parallel import fingerprint, first_difference
from ..lightning_state import to_json

_DTYPES = {"64-true": "fp64", "32-true": "fp32", "bf16-true": "bf16", "16-true": "fp16"}
_LOAD_OPTIONS = {"map_location": None, "hparams_file": None, "strict": True, "weights_only": True}  # and what is done

_CALLBACKS = ("early_stopping", "lr_monitor", "model_checkpoint", "model_summary", "progress.", "rich_model_summary")
# Where the code is that reads no weights between an update and the next forward pass, or waits for them.
_WAITING = ("lmscale.", "lightning.pytorch.loggers.", "lightning.pytorch.profilers.")
_WAITING += tuple(f"lightning.pytorch.callbacks.{name}" for name in _CALLBACKS)


def reads_no_weights(trainer: L.Trainer) -> bool:
    """Whether none of the user's code that the Trainer calls may read weights between an update and the next forward
    pass: model, module, data module, strategy, profiler, callbacks and loggers are the project's, or of those of
    Lightning's in `_WAITING`, without hooks set on them."""
    module = trainer.lightning_module
    objects = (module, trainer.datamodule, trainer.strategy, trainer.profiler, *trainer.callbacks, *trainer.loggers)
    known = all(each is None or type(each).__module__.startswith(_WAITING) for each in objects)
    set_on_it = any(callable(value) and hasattr(L.LightningModule, name) for name, value in vars(module).items())
    hooks = any(each._forward_pre_hooks or each._forward_hooks for each in module.modules())
    return known and not set_on_it and not hooks and module.config.family in BUILT_IN


def dtype_of_trainer(trainer: L.Trainer) -> str:
    """Our name for the Trainer's `precision`.

    Raises:
        ValueError: mixed precision, which keeps half copies of fp32 weights; ours keeps fp32 masters of half weights.
    """
    name = str(trainer.precision)
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"`precision` must be one of {known} (half types keep fp32 masters), but is {name}")
    return _DTYPES[name]


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings of the Trainer that the training step does not support.

    Raises:
        ValueError: a strategy without tensor ranks, clipping by value or by no number, mixed precision, another writer
            of checkpoints, an accumulation of batches, an average of weights, weights that are unfrozen on the way, or
            a checkpoint of several ranks at an exception; or a module that would leave weights out, or whose
            hyperparameters are not plain values.
    """
    check_strategy(trainer)
    _check_module(trainer.lightning_module)
    dtype_of_trainer(trainer)
    if trainer.gradient_clip_algorithm == "value":
        raise ValueError("`gradient_clip_algorithm` must be norm (of the whole model's gradient), but is value")
    clip = trainer.gradient_clip_val
    if clip is not None and not clip >= 0:
        raise ValueError(f"`gradient_clip_val` must be at least 0, but is {clip}")
    writer = trainer.strategy.checkpoint_io
    if type(writer) is not TorchCheckpointIO:  # Lightning's default
        raise ValueError(
            "`plugins` must not write checkpoints, which the strategy does in its own format, but there is "
            f"{type(writer).__name__}"
        )
    schedulers = [c.scheduling for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    for accumulated in (*schedulers, trainer.accumulate_grad_batches):
        if accumulated != 1:
            rule = "1, because a batch is a whole step that the module's `micro_batch_size` divides"
            refuse("accumulate_grad_batches", rule, accumulated)
    for callback in trainer.callbacks:
        averages = isinstance(callback, StochasticWeightAveraging | WeightAveraging)
        unfreezes = isinstance(callback, BaseFinetuning)
        saves = isinstance(callback, OnExceptionCheckpoint)
        saves = saves or (isinstance(callback, ModelCheckpoint) and callback.save_on_exception)
        instead = "freeze them by `requires_grad_(False)` in `configure_model`"
        broken = {
            "average weights, which copies a module without its ranks": averages,
            f"unfreeze weights during the training ({instead})": unfreezes,
            # It would wait for those of the other ranks, which are within a step, or mix their steps.
            f"save at an exception on one of {trainer.world_size} ranks": saves and trainer.world_size > 1,
        }
        for what, is_done in broken.items():
            if is_done:
                raise ValueError(f"`callbacks` must not {what}, but there is {type(callback).__name__}")


def check_load_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a module's constructor without those of Lightning's `load_from_checkpoint`.

    Raises:
        ValueError: one of these asks for what is not done.
    """
    for name, done in _LOAD_OPTIONS.items():
        if (value := options.get(name)) not in (None, done):
            raise ValueError(
                f"`{name}` must be left out of `load_from_checkpoint`, after which the Trainer reads all weights onto "
                f"its device, but is {value!r}"
            )
    return {name: value for name, value in options.items() if name not in _LOAD_OPTIONS}


def _check_module(module: L.LightningModule) -> None:
    if not module.strict_loading:
        raise ValueError("`strict_loading` must be True, because all weights are read, but is False")
    for name, value in module.hparams.items():
        try:
            to_json(value)
        except ValueError:  # the loggers and the checkpoints would refuse it, which come later
            raise ValueError(
                f"`save_hyperparameters` must save plain values (without `{name}`: ignore=[{name!r}]), but {name} is a "
                f"{type(value).__name__}"
            ) from None


def check_equal_batches(batch: list[dict[str, Any]], strategy: Any) -> None:
    """Check that the ranks of each tensor group have the same batch; otherwise their parts of the model would see
    different samples.

    Raises:
        ValueError: they differ, on all ranks.

    Communicates:
        with tp_size above 1, an all-reduce of 2 int64 over the tensor group and a vote over the world.
    """
    tensors = [value for each in batch for value in each.values() if isinstance(value, Tensor)]
    if strategy.parallel.tp_size == 1 or not tensors:
        return
    hashes = torch.stack([fingerprint(tensor) for tensor in tensors])
    differs = first_difference({"batch": hashes}, strategy.parallel.tp_group) is not None
    if any(strategy.ranks.any(differs)):
        raise ValueError(
            "batches of the DataLoader must be equal on the ranks of a tensor group (draw samples and augmentations "
            "from torch's generator, or from one of your own with a fixed seed), but differ"
        )
