"""The learning rate of every update: linear warm-up, a constant rate if `cooldown_steps` is set, a decay to a floor."""

import math
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ...config.training import ScheduleConfig
from .optimizer import MixedPrecisionAdamW


class UpdateSchedule(LRScheduler):
    """`learning_rate_of_update` as a torch scheduler: sets the rate of the optimizer's next update.

    Skipped steps do not count. The only state is the optimizer's `num_updates`, as far as the host knows it: the
    host does not wait for the GPU. `TrainingModule` thus steps the schedule before the update too, once the last step
    is known.
    """

    def __init__(self, optimizer: MixedPrecisionAdamW, schedule: ScheduleConfig, peak: float) -> None:
        self.schedule, self.peak = schedule, peak
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The rate for each parameter group."""
        lr = learning_rate_of_update(self.optimizer.counters.known.num_updates + 1, self.schedule, self.peak)
        return [lr * group["rate_factor"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Set the rate of the next update."""
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def check(self) -> None:
        """Check before a step that the rates are those that were set.

        Raises:
            ValueError: a callback has set another one, which `step` would replace.
        """
        found = [group["lr"] for group in self.optimizer.param_groups]
        if found != self._last_lr:
            raise ValueError(
                f"`lr` of the optimizer must stay the schedule's {self._last_lr[0]:g} between steps (replace the "
                f"schedule in `configure_optimizers`), but is {found[0]:g}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Empty: the optimizer's `num_updates` determines the rate."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the rate of the first update after the checkpoint's."""
        self.step()


def learning_rate_of_update(update: int, schedule: ScheduleConfig, peak: float) -> float:
    """Learning rate of the `update`-th optimizer update of a run, counting from 1.

    `paper` gives update k the rate at t = k, so that the first update moves the weights. `megatron_v1` gives it the
    rate at t = k - 1, as that code did: its first update has a rate of 0.

    Args:
        update: at least 1; updates skipped for an overflow do not count.
        schedule, peak: see `learning_rate`.
    """
    return learning_rate(update if schedule.formula == "paper" else update - 1, schedule, peak)


def learning_rate(t: float, schedule: ScheduleConfig, peak: float) -> float:
    """Learning rate after `t` updates: warm-up to `peak` over w updates, then decay to `min_lr` at E = `decay_steps`.

    With `cooldown_steps` C the rate stays at the peak until E - C, and w is E - C in the formula of the decay.

    Both formulas warm up by peak t / w for t <= w. After it, with c(x) = (1 + cos(pi x)) / 2 or 1 - x:

    - `paper`: min_lr + c((t - w) / (E - w)) (peak - min_lr), and min_lr from E on. The text of sections 5.2 and 5.3.
    - `megatron_v1`: max(min_lr, peak c((min(t, E - w) - w) / E)). The code that made the paper's runs: the ratio is
      taken over E instead of E - w and stops growing at E - w, so a cosine reaches its floor early and a linear decay
      never reaches 0.

    Args:
        t: updates done, at least 0.
        schedule: warm-up, decay, floor and formula.
        peak: the rate at the end of the warm-up.

    Source: sections 5.2 and 5.3; NVIDIA/Megatron-LM v2.0 and v1.0, `learning_rates.py`; warm-up, stable, decay: Hu et
        al. 2024 (arXiv:2404.06395).
    """
    warmup, end, floor = schedule.warmup_steps, schedule.decay_steps, schedule.min_lr
    if t <= warmup and warmup > 0:
        return peak * t / warmup
    if schedule.decay == "constant":
        return peak
    if schedule.formula == "megatron_v1":
        return max(floor, peak * _remaining((min(t, end - warmup) - warmup) / end, schedule.decay))
    if t >= end:
        return floor
    start = warmup if schedule.cooldown_steps is None else end - schedule.cooldown_steps
    return peak if t <= start else floor + _remaining((t - start) / (end - start), schedule.decay) * (peak - floor)


def _remaining(ratio: float, decay: str) -> float:
    """Remaining fraction of the decay, 1 at ratio 0 and 0 at ratio 1."""
    return (1.0 + math.cos(math.pi * ratio)) / 2.0 if decay == "cosine" else 1.0 - ratio
