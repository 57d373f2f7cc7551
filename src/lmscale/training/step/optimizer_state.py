"""What a checkpoint stores of the optimizer, and how it is loaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .counters import DeviceCounters

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """The part of `MixedPrecisionAdamW` that checkpoints read and write; see there for the attributes."""

    names: list[str]
    model_parameters: list[nn.Parameter]
    masters: list[Tensor]
    holds_masters: bool
    dtypes: dict[str, torch.dtype]
    state: dict[Tensor, dict[str, Any]]
    counters: DeviceCounters

    def fp32_masters(self) -> dict[str, Tensor]:
        """The masters by parameter name; empty if the parameters are their own masters."""
        return dict(zip(self.names, self.masters, strict=True)) if self.holds_masters else {}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by checkpoint key, `model/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>`:
        shards, not copies. For half types the weights are the fp32 masters; moments only after the first update.
        """
        tensors, has_moments = {}, self.counters.read().num_updates > 0
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"model/{name}"] = master.detach()
            if has_moments:
                tensors |= {f"{kind}/{name}": self.state[master][kind] for kind in MOMENTS}
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """`{"tensors": as tensors(), "counters": {...}}`."""
        counters = self.counters.read()._asdict()
        del counters["grad_norm"]
        if not self.counters.dynamic:
            counters["loss_scale"] = None
        return {"tensors": self.tensors(), "counters": counters}

    @torch.no_grad()
    def load_masters(self, read_into: Callable[[str, Tensor], None]) -> None:
        """Load the fp32 masters of half-type parameters from a checkpoint.

        Args:
            read_into: fills a tensor with this rank's part of the logical tensor of a checkpoint key.
        """
        for name, master in self.fp32_masters().items():
            read_into(f"model/{name}", master)

    @torch.no_grad()
    def load_moments(self, counters: dict[str, Any], read_into: Callable[[str, Tensor], None]) -> None:
        """Load the moments in place, one tensor at a time, and the counters of `state_dict`."""
        self.counters.load(counters)
        if counters["num_updates"]:
            for name, master in zip(self.names, self.masters, strict=True):
                for kind in MOMENTS:
                    read_into(f"{kind}/{name}", self.state[master][kind])
