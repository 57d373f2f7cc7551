"""Faults that only a GPU, or the code generated for it, would show; the tests must report every one of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plant a fault of `FAULTS` in lmscale; None: none."""
    if fault is None:
        yield
        return
    import lmscale.models.attention
    import lmscale.models.layer
    import lmscale.models.transformer
    import lmscale.parallel.rng
    import lmscale.parallel.sequence_parallel
    import lmscale.training.module  # noqa: F401

    target, make = FAULTS[fault]
    with mock.patch(target, make()):
        yield


def columns_from_four() -> Callable[..., Any]:
    """A mask whose first column's product goes beyond int32."""
    import torch

    from lmscale.parallel.rng import _COLUMN, _GOLDEN, _mix

    def mask(keys: Any, num_rows: int, num_columns: int, probability: float) -> Any:
        rows = torch.arange(num_rows, dtype=torch.int32, device=keys.device)
        columns = torch.arange(4, 4 + num_columns, dtype=torch.int32, device=keys.device)
        row_keys = _mix(keys.unsqueeze(-1) + rows * _GOLDEN)
        return _mix(row_keys.unsqueeze(-1) ^ (columns * _COLUMN)) >= int(probability * 2**32) - 2**31

    return mask


def sites_on_the_host() -> Callable[..., Any]:
    """Dropout sites made without their device."""
    import torch

    from lmscale.parallel.rng import _SITE, _mix

    return lambda keys, num_sites: _mix(keys + (torch.arange(1, num_sites + 1).unsqueeze(-1) * _SITE % 2**31).int())


def loss_checked_by_the_host() -> Callable[..., Any]:
    """The host looks at the loss of every micro-batch."""

    def loss_sums(self: Any, batch: dict, sample_keys: Any) -> Any:
        sums = self.loss.loss_sums(self.model, batch, sample_keys)
        assert sums.isfinite().all() or sums is not None
        return sums

    return loss_sums


def graph_break() -> Callable[..., Any]:
    """Something in a layer that torch.compile cannot trace."""
    import torch

    from lmscale.models.layer import TransformerLayer

    drop = TransformerLayer._drop

    def breaking(self: Any, x: Any, keys: Any) -> Any:
        torch._dynamo.graph_break()
        return drop(self, x, keys)

    return breaking


def rows_without_their_offset() -> Callable[..., Any]:
    """A rank takes every part of a sequence for the first one."""
    return lambda keys, first_row: keys.expand(*keys.shape[:-1], len(first_row))


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "columns from four": ("lmscale.parallel.rng.counter_keep_mask", columns_from_four),
    "sites on the host": ("lmscale.models.transformer.site_keys", sites_on_the_host),
    "loss checked by the host": (
        "lmscale.training.module.PretrainModule.loss_sums",
        loss_checked_by_the_host,
    ),
    "graph break": ("lmscale.models.layer.TransformerLayer._drop", graph_break),
    "rows without their offset": ("lmscale.parallel.sequence_parallel.keys_from_row", rows_without_their_offset),
}
