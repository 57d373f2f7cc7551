"""Measurements on a GPU: attention backends compared on equal inputs, and the counts of a trace."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.gpu import attention_backends, trace
from analysis.benchmarks.gpu.attention_backends import AttentionShape, relative_errors, time_backends
from analysis.benchmarks.gpu.device import median_time_s, require_device
from lmscale.config.training import PrecisionConfig

CPU = torch.device("cpu")


def test_a_backend_that_rejects_the_inputs_has_a_reason_and_no_time() -> None:
    shape = AttentionShape.parse("gpt_1.2b:2:3:7:8")
    times, refused = time_backends(shape, ["math", "cudnn", "flash3"], 0.1, CPU, rounds=1, repeats=2)
    assert set(times) == {"math"} and times["math"] > 0
    assert set(refused) == {"cudnn", "flash3"} and "backend" in refused["cudnn"]
    assert refused["flash3"] == "No module named 'flash_attn_interface'"


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_backend_is_within_the_rounding_of_bf16(name) -> None:
    torch.manual_seed(1)
    errors = relative_errors(AttentionShape(name, 2, 3, 37, 8), "math", CPU)
    assert all(0 < error < 8e-3 for error in errors)  # bf16 has 8 significant bits


def test_the_error_detects_a_wrong_mask(monkeypatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(AttentionShape, "causal", property(lambda shape: next(answers)))
    answers = iter((False, True))  # the backend is bidirectional, the reference causal
    assert min(relative_errors(AttentionShape("gpt", 1, 3, 37, 8), "math", CPU)) > 0.1


def test_a_backend_with_wrong_results_has_no_time(monkeypatch) -> None:
    monkeypatch.setattr(attention_backends, "relative_errors", lambda shape, *_: (1e-3, 0.5 if shape.causal else 1e-3))
    options = {
        "shape": ["gpt:2:3:7:8", "bert:2:3:7:8"],
        "backends": ["math"],
        "dropout": 0.1,
        "seed": 1,
        "record": None,
    }
    record = attention_backends.measure(Namespace(**options, accelerator="cpu", rounds=1, repeats=1))
    assert {name for name in record["metrics"] if "dropout" in name} == {"bert/dropout_0/math", "bert/dropout_0.1/math"}
    assert set(record["refused"]) == {"gpt/dropout_0/math", "gpt/dropout_0.1/math"}


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


def event(name: str, start: float, end: float, cuda: bool = False, annotation: bool = False) -> SimpleNamespace:
    """An event of the host or of the device; times in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if cuda else DeviceType.CPU,
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        self_cpu_time_total=end - start,
    )


EVENTS = [
    event("aten::mm", 0, 4),
    *(event(name, 1, 2) for name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch")),
    event("cudaMemcpyAsync", 2, 3),
    event("cudaStreamSynchronize", 3, 9),
    event("aten::_local_scalar_dense", 3, 9),
    event("nvjet_gemm", 4, 7, cuda=True),
    event("nvjet_gemm", 7, 10, cuda=True),
    event("triton_norm", 10, 12, cuda=True),
    event("Optimizer.step", 0, 100, cuda=True, annotation=True),
]


def test_kernels_launches_and_waits_are_counted_per_step() -> None:
    model = {"family": "gpt", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model |= {"max_position_embeddings": 8, "vocab_multiple": 16}
    bench = BenchConfig(model=model, precision=PrecisionConfig("bf16"), micro_batch_size=1, peers=[], steps_per_round=2)
    profiler = SimpleNamespace(events=lambda: EVENTS)
    record = trace._record(bench, "a GPU", profiler, {"optimizer.py:7": 1})
    values = {name: entry["value"] for name, entry in record["metrics"].items()}
    assert (values["kernels"], values["launches"], values["host_syncs"], values["host_reads"]) == (1.5, 2, 0.5, 0.5)
    assert values["kernel_time"] == pytest.approx(4e-6) and values["step"] == pytest.approx(50e-6)
    assert [(k["name"], k["calls_per_step"], k["share"]) for k in record["kernels"]] == [
        ("nvjet_gemm", 1.0, pytest.approx(0.75)),
        ("triton_norm", 0.5, pytest.approx(0.25)),
    ]
    assert record["syncs"] == {"cudaStreamSynchronize": 1, "aten::_local_scalar_dense": 1}
    assert record["sync_places"] == {"optimizer.py:7": 1}
