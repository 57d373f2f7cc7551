"""Counts of a GPU trace, from synthetic events in the form of torch's profiler."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.gpu import trace
from lmscale.config.training import PrecisionConfig


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
