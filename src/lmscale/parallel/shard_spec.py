"""Parameters that carry a description of the logical tensor they are a shard of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .context import ParallelContext


@dataclass(frozen=True)
class ShardSpec:
    """The logical tensor of a parameter and how it is cut; every parameter carries one as `.shard`.

    Args:
        full_shape: shape of the logical tensor at tp_size 1.
        shard_dim: dimension cut over the tensor ranks; None if every rank holds the whole tensor.
        init: `normal`, `zeros` or `ones`.
        std: standard deviation of `normal`.
        row_gains: factors on what `normal` draws: (rows, factor) of consecutive rows, repeated over dimension 0.
        used_rows: rows (dimension 0) that are part of the model; the padding rows after them are zero.
        padding: indices that the ranks hold after the last one of the sharded dimension, so that their shards are
            equal: weights of dummy heads. They are zero, like their gradients, and in no checkpoint.
        grad_is_partial: a replicated parameter that each tensor rank uses only on its own tokens (sequence
            parallelism), so its gradient must be added over the tensor ranks.
        role: of a matrix in its model, see `models/parametrization.py`: `hidden`, `embedding` or `readout`.
        rate_factor: factor of the learning rate; that of the weight decay is its inverse.
        eps_factor: factor of AdamW's eps.
        tie: of the word embedding in a pipeline: `owner` in the first stage, `copy` in the last; None with one stage.
    """

    full_shape: tuple[int, ...]
    shard_dim: int | None = None
    init: str = "zeros"
    std: float = 0.0
    used_rows: int | None = None
    grad_is_partial: bool = False
    row_gains: tuple[tuple[int, float], ...] = ()
    padding: int = 0
    role: str = "hidden"
    rate_factor: float = 1.0
    eps_factor: float = 1.0
    tie: str | None = None

    @property
    def replicated(self) -> bool:
        """Whether every tensor rank holds the same whole tensor."""
        return self.shard_dim is None


def parameter(context: ParallelContext, full_shape: tuple[int, ...], **options: Any) -> nn.Parameter:
    """An uninitialized parameter of this rank's shape, with the current default device and dtype.

    Args:
        full_shape: shape of the logical tensor.
        options: the other fields of its `ShardSpec`, such as `shard_dim`, `init`, `std` or `padding`.

    Raises:
        ValueError: `tp_size` does not divide the sharded dimension with its padding.
    """
    spec, shape = ShardSpec(tuple(full_shape), **options), list(full_shape)
    if spec.shard_dim is not None:
        shape[spec.shard_dim] = context.shard(shape[spec.shard_dim] + spec.padding)
    param = nn.Parameter(torch.empty(shape))
    param.shard = spec
    return param


def padding_of(module: nn.Module) -> dict[str, int]:
    """`ShardSpec.padding` by the names of the parameters that have some."""
    return {name: param.shard.padding for name, param in module.named_parameters() if param.shard.padding}


def describe_parameters(module: nn.Module) -> str:
    """A module's own parameters for `print(model)`: shapes on this rank, and of the whole where they are shards."""
    found = []
    for name, param in module.named_parameters(recurse=False):
        full = param.shard.full_shape if hasattr(param, "shard") else param.shape
        found.append(f"{name} {list(param.shape)}" + (f" of {list(full)}" if param.shape != full else ""))
    return ", ".join(found)
