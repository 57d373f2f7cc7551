"""What a checkpoint stores of the optimizer, and how it is loaded."""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from ...parallel import ParallelContext
from .counters import DeviceCounters
from .gradient_buffer import GradientBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """The part of `MixedPrecisionAdamW` that checkpoints read and write; see there for the attributes."""

    context: ParallelContext
    buffer: GradientBuffer
    names: list[str]
    masters: list[Tensor]
    own: dict[str, Tensor]
    holds_masters: bool
    dtypes: dict[str, torch.dtype]
    state: dict[Tensor, dict[str, Any]]
    counters: DeviceCounters

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """The kinds of tensors that a checkpoint has, and their types: moments only after the first update."""
        return self.dtypes if self.counters.read().num_updates else {"model": self.dtypes["model"]}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments of `names` by checkpoint key, `model/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>`:
        shards, not copies. For half types the weights are the fp32 masters.
        """
        return {
            f"{kind}/{name}": master.detach() if kind == "model" else self.state[master][kind]
            for name, master in zip(self.names, self.masters, strict=True)
            for kind in self.kinds
        }

    @torch.no_grad()
    def whole_tensors(self, keys: Container[str]) -> dict[str, Tensor]:
        """`tensors` of whole parameters: with ZeRO-1 copies in host memory of those in `keys`, else all.

        Communicates:
            with ZeRO-1 as `GradientBuffer.gather` for each kind, in the place of the gradients.
        """
        if not self.context.zero1:
            return self.tensors()
        found = {}
        for kind, dtype in self.kinds.items():
            self.buffer.own(self.buffer.flat).copy_(self.own[kind])
            self.buffer.gather(self.buffer.flat)
            for name, view in self.buffer.views.items():
                if (key := f"{kind}/{name}") in keys:
                    found[key] = view.to("cpu", dtype, copy=True)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The counters, which a checkpoint has besides the tensors."""
        counters = self.counters.read()._asdict()
        del counters["grad_norm"]
        return counters if self.counters.dynamic else counters | {"loss_scale": None}

    @torch.no_grad()
    def load_masters(self, read_into: Callable[[str, Tensor], None]) -> None:
        """Load the fp32 masters of half-type parameters from a checkpoint.

        Args:
            read_into: fills a tensor with this rank's shard of the logical tensor of a checkpoint key.
        """
        if self.holds_masters:
            self._load("model", read_into)

    @torch.no_grad()
    def load_moments(self, counters: dict[str, Any], read_into: Callable[[str, Tensor], None]) -> None:
        """Load the moments in place, one tensor at a time, and the counters of `state_dict`."""
        self.counters.load(counters)
        if counters["num_updates"]:
            for kind in MOMENTS:
                self._load(kind, read_into)

    def _load(self, kind: str, read_into: Callable[[str, Tensor], None]) -> None:
        if not self.context.zero1:
            for name, master in zip(self.names, self.masters, strict=True):
                read_into(f"{kind}/{name}", master if kind == "model" else self.state[master][kind])
            return
        own = self.buffer.own(self.buffer.flat)  # in the place of the gradients
        own.copy_(self.own[kind])  # `read_into` may leave some as they are
        for name, view in self.buffer.views.items():
            read_into(f"{kind}/{name}", view)
        self.own[kind].copy_(own)
