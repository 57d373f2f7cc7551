"""Check the settings of a user's Lightning Trainer before anything is built."""

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging

from ...data.datamodule import check_strategy

_DTYPES = {"64-true": "fp64", "32-true": "fp32", "bf16-true": "bf16", "16-true": "fp16"}


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
        ValueError: a strategy without tensor ranks, clipping by value, mixed precision, an accumulation of batches, or
            an average of weights.
    """
    check_strategy(trainer)
    dtype_of_trainer(trainer)
    if trainer.gradient_clip_algorithm == "value":
        raise ValueError("`gradient_clip_algorithm` must be norm (of the whole model's gradient), but is value")
    schedulers = [c.scheduling for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    for accumulated in (*schedulers, trainer.accumulate_grad_batches):
        if accumulated != 1:
            raise ValueError(
                "`accumulate_grad_batches` must be 1, because a batch is a whole step that the module's "
                f"`micro_batch_size` divides, but is {accumulated}"
            )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                "`callbacks` must not average weights, which copies a module without its ranks, but there is "
                f"{type(callback).__name__}"
            )
