"""AdamW with fp32 masters, dynamic loss scale and tensor-parallel clipping, all in one step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel import ParallelContext, global_gradient_norm, sum_partial_gradients
from ..parallel.collectives import sum_over_data_ranks
from ..training_config import OptimizerConfig, PrecisionConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
_ALL_REDUCE_ELEMENTS = 1 << 26  # 256 MiB at a time


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients above underflow; 1 and constant for other types.

    Doubles after `window` steps without overflow; halves once `hysteresis` overflows have come since it last grew,
    never below `minimum`. All tensor ranks see the same overflows, so they hold the same scale.

    Source: section 4.2 (dynamic loss scaling); constants of Megatron-LM v1.0's `fp16/loss_scaler.py`.
    """

    value: float
    window: int
    hysteresis: int
    minimum: float
    dynamic: bool
    clean_steps: int = 0
    overflows_left: int = 0

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> "LossScale":
        """The initial state: dynamic for fp16, otherwise the constant 1."""
        dynamic = config.dtype == "fp16"
        return cls(
            value=config.initial_loss_scale if dynamic else 1.0,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            minimum=config.min_loss_scale,
            dynamic=dynamic,
            overflows_left=config.hysteresis,
        )

    def update(self, overflow: bool) -> None:
        """Take note of one step."""
        if not self.dynamic:
            return
        if overflow:
            self.clean_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.value = max(self.value / 2.0, self.minimum)
        else:
            self.clean_steps += 1
            if self.clean_steps % self.window == 0:
                self.overflows_left = self.hysteresis
                self.value *= 2.0


class MixedPrecisionAdamW(torch.optim.AdamW):
    """AdamW over one rank's shard: unscale, agree on overflow, clip by the global norm, update fp32 masters, copy back.

    Parameters of half types get an fp32 master here, from the start, and the gradient of each micro-batch is added in
    fp32 to the master's as soon as it is there: over 512 micro-batches a sum in bf16 loses 12 % of its norm. fp32 and
    fp64 parameters are their own masters and sum their own gradients. Weight decay applies to matrices and embeddings,
    not to biases and LayerNorms (section 4.2), which are the parameters of one dimension. A step whose gradient is not
    finite on any tensor rank is skipped on all: weights, moments and `num_updates` stay, `num_skipped` counts.
    `skipped_in_a_row` counts since the last update, without the steps that fp16's loss scale answers by coming down.

    Args:
        named_parameters: (name, parameter) of the rank's model.
        config, precision: see `run_config`.
        context: gives the tensor group for norm and overflow.

    Communicates:
        one all-reduce of three numbers over the tensor group a step; `reduce_gradients` over the data group.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        precision: PrecisionConfig,
        context: ParallelContext,
    ) -> None:
        self.names: list[str] = []
        self.model_parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        groups = {True: [], False: []}
        for name, param in named_parameters:
            half = param.dtype in (torch.float16, torch.bfloat16)
            master = param.detach().float() if half else param
            master.shard = param.shard
            self.names.append(name)
            self.model_parameters.append(param)
            self.masters.append(master)
            groups[param.ndim > 1].append(master)
        self.holds_masters = any(m is not p for m, p in zip(self.masters, self.model_parameters, strict=True))
        self.context = context
        self._flat_gradient: Tensor | None = None
        if self.holds_masters:
            self._sum_gradients_in_fp32()
        self.max_grad_norm = config.max_grad_norm
        self.loss_scale = LossScale.from_config(precision)
        self.num_updates = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0
        self.grad_norm = float("nan")
        super().__init__(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of the next update, for all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def _sum_gradients_in_fp32(self) -> None:
        """Masters' gradients, side by side in one buffer, take up the parameters' as the backward pass makes them."""
        sizes = [master.numel() for master in self.masters]
        self._flat_gradient = torch.zeros(sum(sizes), dtype=torch.float32, device=self.masters[0].device)
        parts = self._flat_gradient.split(sizes)
        for master, param, part in zip(self.masters, self.model_parameters, parts, strict=True):
            master.grad = part.view_as(master)
            param.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    def reduce_gradients(self) -> None:
        """Add what the ranks have of a gradient: of half types over the data ranks, in fp32 (those of other types are
        DDP's business); with sequence parallelism, of the parameters that saw a rank's own positions alone.

        Communicates:
            all-reduces of together N fp32 numbers over the data group, N the parameters of the rank; with sequence
            parallelism one over the tensor group, of the LayerNorms, row biases, position and type embeddings.
        """
        sum_partial_gradients(self.masters, self.context)
        if self._flat_gradient is not None and self.context.dp_size > 1:
            for part in self._flat_gradient.split(_ALL_REDUCE_ELEMENTS):
                sum_over_data_ranks(part, self.context)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the step by parameter name, where there are any."""
        return {n: m.grad for n, m in zip(self.names, self.masters, strict=True) if m.grad is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        if self._flat_gradient is not None:
            self._flat_gradient.zero_()
            return
        for param in self.model_parameters:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update, or none where a gradient is not finite; see the class."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        scale = self.loss_scale.value
        measured = global_gradient_norm(self.masters, self.context)
        self.grad_norm = measured.norm / scale
        can_come_down = self.loss_scale.dynamic and self.loss_scale.value > self.loss_scale.minimum
        self.loss_scale.update(overflow=not measured.finite)
        if not measured.finite:
            self.num_skipped += 1
            self.skipped_in_a_row += not can_come_down
            return
        self.skipped_in_a_row = 0
        factor = 1.0 / scale
        if self.max_grad_norm is not None:
            factor *= min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
        if factor != 1.0:
            torch._foreach_mul_([master.grad for master in self.masters], factor)
        super().step()
        if self.holds_masters:
            torch._foreach_copy_(self.model_parameters, self.masters)
        self.num_updates += 1

    def fp32_masters(self) -> dict[str, Tensor]:
        """The masters by parameter name; empty where the parameters are their own."""
        return dict(zip(self.names, self.masters, strict=True)) if self.holds_masters else {}

    def tensors(self) -> dict[str, Tensor]:
        """The exact weights and the moments by checkpoint key, `model/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>`:
        shards, not copies. Of half types the weights are the fp32 masters; moments are there once there was an update.
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
        """Take the exact weights of a checkpoint where the parameters, of a half type, cannot hold them.

        Args:
            read_into: fills a tensor with this rank's part of the logical tensor of a checkpoint key.
        """
        for name, master in self.fp32_masters().items():
            read_into(f"model/{name}", master)

    @torch.no_grad()
    def load_moments(self, counters: dict[str, Any], read_into: Callable[[str, Tensor], None]) -> None:
        """Take over the moments, one tensor at a time into its place, and the counters of `state_dict`."""
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        if self.num_updates:
            for name, master in zip(self.names, self.masters, strict=True):
                self.state[master] = {kind: torch.empty_like(master) for kind in MOMENTS}
                for kind in MOMENTS:
                    read_into(f"{kind}/{name}", self.state[master][kind])
                self.state[master]["step"] = torch.tensor(float(self.num_updates), device=master.device)
        if self.loss_scale.dynamic and counters["loss_scale"] is not None:
            self.loss_scale.value = counters["loss_scale"]
            self.loss_scale.clean_steps = counters["loss_scale_clean_steps"]
            self.loss_scale.overflows_left = counters["loss_scale_overflows_left"]


@torch.no_grad()
def _move_gradient(master: Tensor, param: nn.Parameter) -> None:
    master.grad += param.grad
    param.grad = None
