"""What the optimizer counts: skipped steps, the loss scale with its hysteresis, and the factor that clips."""

import pytest
import torch

from lmscale.config.training import PrecisionConfig
from lmscale.parallel import GradientNorm
from lmscale.training.step.counters import DeviceCounters


def advance(counters: DeviceCounters, overflow: bool) -> torch.Tensor:
    """Count a step whose gradient has norm 1, or nan."""
    norm = torch.tensor(float("nan") if overflow else 1.0, dtype=torch.float64)
    step = counters.advance(GradientNorm(norm, torch.tensor(not overflow)), 0.5, torch.float32)
    counters.publish()
    return step


def test_the_loss_scale_grows_and_halves_with_hysteresis() -> None:
    config = PrecisionConfig("fp16", initial_loss_scale=8.0, loss_scale_window=3, hysteresis=2, min_loss_scale=2.0)
    counters = DeviceCounters(config, (0.9, 0.999), torch.device("cpu"))
    history = []
    for overflow in (False, False, False, True, False, True, True, True, True, False, False, False):
        advance(counters, overflow)
        history.append(counters.loss_scale.item())
    # doubled after 3 finite steps; the first overflow is tolerated; minimum 2; grows again
    assert history == [8, 8, 16, 16, 16, 8, 4, 2, 2, 2, 2, 4]


def test_growth_of_the_loss_scale_restores_the_hysteresis() -> None:
    config = PrecisionConfig("fp16", initial_loss_scale=8.0, loss_scale_window=2, hysteresis=2)
    counters = DeviceCounters(config, (0.9, 0.999), torch.device("cpu"))
    history = []
    for overflow in (True, False, False, True, True):
        advance(counters, overflow)
        known = counters.known
        history.append((known.loss_scale, known.loss_scale_overflows_left, known.loss_scale_clean_steps))
    # Without growth in between, the second overflow would halve the scale.
    assert history == [(8, 1, 0), (8, 1, 1), (16, 2, 2), (16, 1, 0), (8, 0, 0)]


def test_a_skipped_first_step_has_the_numbers_of_the_first_update() -> None:
    """With those of update 0 the corrections would be 0, and 0 / 0 would reach the weights."""
    counters = DeviceCounters(PrecisionConfig("bf16"), (0.9, 0.99), torch.device("cpu"))
    assert advance(counters, overflow=True)[1:].tolist() == pytest.approx([0.0, 0.1, 0.01, 1.0])
    assert advance(counters, overflow=False)[1:].tolist() == pytest.approx([1.0, 0.1, 0.01, 1.0])
    assert advance(counters, overflow=False)[1:].tolist() == pytest.approx([1.0, 0.19, 0.0199, 2.0])


@pytest.mark.parametrize("scaled_norm, expected", [(24.0, 0.5 / (3.0 + 1e-6) / 8.0), (3.2, 1.0 / 8.0)])
def test_clipping_compares_its_limit_with_the_norm_without_the_loss_scale(scaled_norm: float, expected: float) -> None:
    counters = DeviceCounters(PrecisionConfig("fp16", initial_loss_scale=8.0), (0.9, 0.999), torch.device("cpu"))
    norm = GradientNorm(torch.tensor(scaled_norm, dtype=torch.float64), torch.tensor(True))
    factor = counters.advance(norm, 0.5, torch.float64)[0]
    assert factor.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype, counted", [("fp16", [0, 1, 2, 0, 1]), ("bf16", [1, 2, 3, 0, 1])])
def test_skipped_steps_in_a_row_count_only_if_the_loss_scale_cannot_decrease(dtype: str, counted: list[int]) -> None:
    config = PrecisionConfig(dtype, initial_loss_scale=4.0, hysteresis=1, min_loss_scale=2.0)
    counters, history = DeviceCounters(config, (0.9, 0.999), torch.device("cpu")), []
    for overflow in (True, True, True, False, True):
        advance(counters, overflow)
        history.append(counters.read().skipped_in_a_row)
    assert history == counted


def test_a_loaded_loss_scale_is_taken_by_fp16_alone() -> None:
    updates = 2**24 + 1  # not a number of fp32
    saved = {"num_updates": updates, "loss_scale": 32.0, "loss_scale_clean_steps": 1, "loss_scale_overflows_left": 1}
    config, found = {"initial_loss_scale": 8.0, "loss_scale_window": 2, "hysteresis": 3}, {}
    for dtype in ("fp16", "bf16"):
        for scale in (32.0, None):
            counters = DeviceCounters(PrecisionConfig(dtype, **config), (0.9, 0.999), torch.device("cpu"))
            counters.load(saved | {"loss_scale": scale})
            advance(counters, overflow=False)
            known = counters.read()
            found[dtype, scale] = (known.num_updates, known.loss_scale, known.loss_scale_overflows_left)
    assert found["fp16", 32.0] == (updates + 1, 64.0, 3)  # the second clean step doubles it
    assert found["fp16", None] == (updates + 1, 8.0, 3)
    assert found["bf16", 32.0] == found["bf16", None] == (updates + 1, 1.0, 3)


def test_on_a_gpu_the_host_waits_for_the_copy_of_the_counters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is a subclass of a CPU tensor; pinned memory and events are replaced by what records their use."""
    calls = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    class Pinned:
        def copy_(self, values: torch.Tensor, non_blocking: bool = False) -> None:
            calls.append(("copy", non_blocking))
            self.tolist = values.tolist

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

    def to(self: torch.Tensor, target: torch.device | torch.dtype) -> torch.Tensor:
        return self.as_subclass(OnGpu) if target == torch.device("cuda") else self.type(target)

    def empty_like(values: torch.Tensor, **options: object) -> Pinned:
        calls.append(options)
        return Pinned()

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
        counters = DeviceCounters(PrecisionConfig("bf16"), (0.9, 0.999), torch.device("cuda"))
    assert counters.read().num_updates == 0 and calls == [{"device": "cpu", "pin_memory": True}]
    advance(counters, overflow=False)
    assert counters.known.num_updates == 0  # the host does not know yet, and has not waited
    assert counters.read().num_updates == counters.read().num_updates == 1
    assert calls[1:] == [("copy", True), "record", "wait"]
