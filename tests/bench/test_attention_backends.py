"""Attention backends are compared on equal inputs; one that rejects them is reported."""

import pytest
import torch

from analysis.benchmarks.gpu.attention_backends import AttentionShape, relative_error, time_backends
from analysis.benchmarks.gpu.device import median_time_s, require_device

CPU = torch.device("cpu")


def test_a_backend_that_rejects_the_inputs_has_a_reason_and_no_time() -> None:
    shape = AttentionShape.parse("gpt_1.2b:2:3:7:8")
    times, refused = time_backends(shape, ["math", "cudnn"], 0.1, CPU, rounds=1, repeats=2)
    assert set(times) == {"math"} and times["math"] > 0
    assert set(refused) == {"cudnn"} and "backend" in refused["cudnn"]


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_backend_is_within_the_rounding_of_bf16(name) -> None:
    torch.manual_seed(1)
    assert 0 < relative_error(AttentionShape(name, 2, 3, 37, 8), "math", CPU) < 5e-3  # bf16 has 8 significant bits


def test_the_error_detects_a_wrong_mask(monkeypatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(AttentionShape, "causal", property(lambda shape: next(answers)))
    answers = iter((False, True))  # the backend is bidirectional, the reference causal
    assert relative_error(AttentionShape("gpt", 1, 3, 37, 8), "math", CPU) > 0.1


@pytest.mark.parametrize("text", ["gpt:1:2:3", "t5:1:2:3:4", "gpt:1:2:3:0", "gpt:1:2:3:x"])
def test_a_shape_of_another_form_is_refused(text) -> None:
    with pytest.raises(ValueError, match="must be name:b:n:s:d"):
        AttentionShape.parse(text)


def test_the_time_is_the_median_of_calls_after_the_warm_up(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("time.perf_counter", iter((0.0, 1.0, 1.0, 4.0, 4.0, 6.0)).__next__)
    assert median_time_s(lambda: calls.append(1), CPU, repeats=3, warm_up=2) == 2.0
    assert len(calls) == 5


def test_a_cpu_is_never_used_in_place_of_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert require_device("cpu") == (CPU, "cpu")
    with pytest.raises(ValueError, match="must be cpu if torch finds no GPU"):
        require_device("gpu")
