"""The dynamic loss scale of fp16."""

from dataclasses import dataclass

from ...config.training import PrecisionConfig


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
        """Update the scale after one step.

        Args:
            overflow: whether a gradient of the step was not finite on any rank.
        """
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
