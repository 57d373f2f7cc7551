"""What the optimizer counts: on its device, without host synchronization."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config.training import PrecisionConfig
from ...parallel import GradientNorm


class Counters(NamedTuple):
    """The state of the optimizer besides its tensors, on the host.

    Args:
        num_updates: steps that changed the weights.
        num_skipped: steps that did not, because a gradient was not finite.
        skipped_in_a_row: skipped steps since the last update, except those after which fp16's loss scale can decrease.
        loss_scale: the factor that keeps fp16 gradients above underflow; 1 and constant for other types.
        loss_scale_clean_steps: updates since the last overflow.
        loss_scale_overflows_left: overflows until the scale is halved.
        grad_norm: of the whole model in the last step, before clipping; nan before the first.
    """

    num_updates: int
    num_skipped: int
    skipped_in_a_row: int
    loss_scale: float
    loss_scale_clean_steps: int
    loss_scale_overflows_left: int
    grad_norm: float


class DeviceCounters:
    """`Counters` as one fp64 tensor on the device, which `advance` updates without the host.

    The dynamic loss scale doubles after `window` steps without overflow; it halves once `hysteresis` overflows have
    come since it last grew, never below its minimum. All ranks see the same overflows, so they hold the same counters.

    Attributes:
        values: fp64 [7], in the order of `Counters`.
        known: the counters on the host, as of the last `read`; on a CPU always the newest.

    Source: section 4.2 (dynamic loss scaling); constants of Megatron-LM v1.0's `fp16/loss_scaler.py`.
    """

    def __init__(self, config: PrecisionConfig, betas: tuple[float, float], device: torch.device) -> None:
        self.config, self._betas = config, betas
        self.betas = torch.tensor(betas, dtype=torch.float64).to(device)
        self.dynamic = config.dtype == "fp16"
        scale = config.initial_loss_scale if self.dynamic else 1.0
        self.known = Counters(0, 0, 0, scale, 0, config.hysteresis, float("nan"))
        self.values = torch.tensor(self.known, dtype=torch.float64).to(device)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copy = torch.empty_like(self.values, device="cpu", pin_memory=True)

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor of the next step's loss: for fp16 fp64 [] on the device, otherwise 1."""
        return self.values[Counters._fields.index("loss_scale")] if self.dynamic else 1.0

    @property
    def grad_norm(self) -> Tensor:
        """The gradient norm of the last step, fp64 [] on the device."""
        return self.values[Counters._fields.index("grad_norm")]

    def advance(self, norm: GradientNorm, max_grad_norm: float | None, dtype: torch.dtype) -> Tensor:
        """Count one step and return the numbers that its updates need.

        Shapes:
            returns [5] of type `dtype`: the factor that clips the gradients and undoes the loss scale; 1, or 0 if the
            step is skipped; Adam's corrections 1 - beta^t of both moments; t, the number of the update, from 1.

        Args:
            norm: of the gradients as they are, with the loss scale.
            max_grad_norm: see `OptimizerConfig`.
            dtype: of the masters; fp32 holds t exactly up to 2^24.
        """
        updates, skipped, in_a_row, scale, clean, left, _ = self.values.unbind()
        finite, grad_norm = norm.finite, norm.norm / scale
        factor = 1.0 / scale
        if max_grad_norm is not None:
            factor = factor * (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        updates = updates + finite
        skipped = skipped + ~finite
        counts = ~(scale > self.config.min_loss_scale) if self.dynamic else True
        in_a_row = torch.where(finite, 0.0, in_a_row + counts)
        if self.dynamic:
            clean = torch.where(finite, clean + 1, 0.0)
            grows = finite & (clean % self.config.loss_scale_window == 0)
            left = torch.where(finite, torch.where(grows, float(self.config.hysteresis), left), left - 1)
            halved = torch.where(left <= 0, (scale / 2).clamp(min=self.config.min_loss_scale), scale)
            scale = torch.where(finite, torch.where(grows, scale * 2, scale), halved)
        self.values.copy_(torch.stack([updates, skipped, in_a_row, scale, clean, left, grad_norm]))
        number = updates.clamp(min=1.0)  # 0 if no step has been finite: any number does, but none may be infinite
        corrections = 1.0 - self.betas**number
        return torch.stack([factor, finite.double(), *corrections, number]).to(dtype)

    def take_betas(self, betas: tuple[float, float]) -> None:
        """Take the decay rates of the next step, which a schedule of torch's may change."""
        if betas != self._betas:
            self._betas = betas
            for entry, beta in zip(self.betas, betas, strict=True):
                entry.fill_(beta)  # copying them from the host would wait for the device

    def publish(self) -> None:
        """Begin to copy the counters to the host, after the last update of a step; on a CPU they are there."""
        if self.values.is_cuda:
            self._copy.copy_(self.values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._take(self.values)

    def read(self) -> Counters:
        """The counters after the last `step`. On a GPU this waits for that step, but not for what was queued since."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
            self._take(self._copy)
        return self.known

    def load(self, counters: dict[str, Any]) -> None:
        """Continue with the counters of a checkpoint (`MixedPrecisionAdamW.state_dict`)."""
        if not self.dynamic or counters["loss_scale"] is None:  # only fp16's loss scale has a state
            counters = {key: value for key, value in counters.items() if not key.startswith("loss_scale")}
        self.known, self._copied = self.known._replace(**counters), None
        self.values.copy_(torch.tensor(self.known, dtype=torch.float64))

    def _take(self, values: Tensor) -> None:
        numbers = zip(Counters.__annotations__.values(), values.tolist(), strict=True)
        self.known = Counters(*(kind(number) for kind, number in numbers))
