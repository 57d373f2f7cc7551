"""AdamW with fp32 masters, dynamic loss scale and tensor-parallel clipping, all in one step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel import ParallelContext, global_gradient_norm
from ..run_config import OptimizerConfig, PrecisionConfig


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

    Parameters of half types get an fp32 master here, from the start; fp32 and fp64 parameters are their own. Weight
    decay applies to matrices and embeddings, not to biases and LayerNorms (section 4.2), which are the parameters of
    one dimension. A step whose gradient is not finite on any tensor rank is skipped on all: weights, moments and
    `num_updates` stay, `num_skipped` counts.

    Args:
        named_parameters: (name, parameter) of the rank's model.
        config, precision: see `run_config`.
        context: gives the tensor group for norm and overflow.

    Communicates:
        one all-reduce of three numbers over the tensor group a step.
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
            self.names.append(name)
            self.model_parameters.append(param)
            self.masters.append(master)
            groups[param.ndim > 1].append(master)
        self.holds_masters = any(m is not p for m, p in zip(self.masters, self.model_parameters, strict=True))
        self.context = context
        self.max_grad_norm = config.max_grad_norm
        self.loss_scale = LossScale.from_config(precision)
        self.num_updates = 0
        self.num_skipped = 0
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the model's parameters."""
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
        measured = global_gradient_norm(self.model_parameters, self.context)
        self.grad_norm = measured.norm / scale
        self.loss_scale.update(overflow=not measured.finite)
        if not measured.finite:
            self.num_skipped += 1
            return
        factor = 1.0 / scale
        if self.max_grad_norm is not None:
            factor *= min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
        if self.holds_masters:
            for master, param in zip(self.masters, self.model_parameters, strict=True):
                master.grad = param.grad.float().mul_(factor)
        elif factor != 1.0:
            torch._foreach_mul_([param.grad for param in self.model_parameters], factor)
        super().step()
        if self.holds_masters:
            torch._foreach_copy_(self.model_parameters, self.masters)
            for master in self.masters:
                master.grad = None
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Moments and masters by parameter name (shards, not copies), and the counters.

        Returns:
            `{"tensors": {"exp_avg/<name>": [local shape], "exp_avg_sq/<name>": ..., "master/<name>": ...}, "counters":
            {...}}`; masters only for half types, moments only once there was an update.
        """
        tensors = {}
        for name, master in zip(self.names, self.masters, strict=True):
            state = self.state.get(master, {})
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind in state:
                    tensors[f"{kind}/{name}"] = state[kind]
            if self.holds_masters:
                tensors[f"master/{name}"] = master
        counters = {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "loss_scale": self.loss_scale.value,
            "loss_scale_clean_steps": self.loss_scale.clean_steps,
            "loss_scale_overflows_left": self.loss_scale.overflows_left,
        }
        return {"tensors": tensors, "counters": counters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, also from another layout's shards cut anew by the checkpoint reader."""
        tensors, counters = state_dict["tensors"], state_dict["counters"]
        for name, master in zip(self.names, self.masters, strict=True):
            if self.holds_masters and f"master/{name}" in tensors:
                master.copy_(tensors[f"master/{name}"])
            if f"exp_avg/{name}" in tensors:
                self.state[master] = {
                    "step": torch.tensor(float(counters["num_updates"]), device=master.device),
                    "exp_avg": tensors[f"exp_avg/{name}"].to(master.device, master.dtype),
                    "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(master.device, master.dtype),
                }
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        if self.loss_scale.dynamic:
            self.loss_scale.value = counters["loss_scale"]
            self.loss_scale.clean_steps = counters["loss_scale_clean_steps"]
            self.loss_scale.overflows_left = counters["loss_scale_overflows_left"]
