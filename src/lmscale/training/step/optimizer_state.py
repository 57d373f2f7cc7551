"""What a checkpoint stores of the optimizer, and how it is loaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .loss_scale import LossScale

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """The part of `MixedPrecisionAdamW` that checkpoints read and write; see there for the attributes."""

    names: list[str]
    model_parameters: list[nn.Parameter]
    masters: list[Tensor]
    holds_masters: bool
    dtypes: dict[str, torch.dtype]
    state: dict[Tensor, dict[str, Any]]
    loss_scale: LossScale
    num_updates: int
    num_skipped: int
    skipped_in_a_row: int

    def fp32_masters(self) -> dict[str, Tensor]:
        """The masters by parameter name; empty if the parameters are their own masters."""
        return dict(zip(self.names, self.masters, strict=True)) if self.holds_masters else {}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by checkpoint key, `model/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>`:
        shards, not copies. For half types the weights are the fp32 masters; moments exist after the first update.
        """
        tensors = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"model/{name}"] = master.detach()
            tensors |= {f"{kind}/{name}": self.state[master][kind] for kind in MOMENTS if master in self.state}
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """`{"tensors": as tensors(), "counters": {...}}`."""
        counters = {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale.value if self.loss_scale.dynamic else None,
            "loss_scale_clean_steps": self.loss_scale.clean_steps,
            "loss_scale_overflows_left": self.loss_scale.overflows_left,
        }
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
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        if self.num_updates:
            for name, master in zip(self.names, self.masters, strict=True):
                self.state[master] = {kind: torch.empty_like(master, dtype=self.dtypes[kind]) for kind in MOMENTS}
                for kind in MOMENTS:
                    read_into(f"{kind}/{name}", self.state[master][kind])
                self.state[master]["step"] = torch.tensor(float(self.num_updates), device=master.device)
        if self.loss_scale.dynamic and counters["loss_scale"] is not None:
            self.loss_scale.value = counters["loss_scale"]
            self.loss_scale.clean_steps = counters["loss_scale_clean_steps"]
            self.loss_scale.overflows_left = counters["loss_scale_overflows_left"]
