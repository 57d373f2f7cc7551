"""Shares of a trace by kind of work: own time, regions before names, kernels by their launches."""

import importlib.util
from pathlib import Path

import pytest

_path = Path(__file__).parents[2] / "analysis" / "trace_shares.py"
_spec = importlib.util.spec_from_file_location("trace_shares", _path)
trace_shares = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(trace_shares)


def op(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: int) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": tid, "args": args}


STEP = op("ProfilerStep#3", 0, 100, "user_annotation")
LINEAR = [op("aten::linear", 10, 30), op("aten::addmm", 12, 20), op("aten::copy_", 14, 4)]


def test_an_operation_counts_with_its_own_time_and_the_rest_is_between_operations() -> None:
    found = trace_shares.shares([STEP, *LINEAR, {"ph": "M", "name": "process_name"}])
    expected = {"matrix products": 0.16, "casts and copies": 0.04, trace_shares.OTHER: 0.10, trace_shares.HOST: 0.70}
    assert found == pytest.approx(expected)
    assert list(found.values()) == sorted(found.values(), reverse=True) and sum(found.values()) == pytest.approx(1)


def test_a_region_counts_whole_and_on_every_thread() -> None:
    optimizer = [op("Optimizer.step#AdamW.step", 50, 20, "user_annotation"), op("aten::mul", 52, 5)]
    attention = [op("aten::scaled_dot_product_attention", 71, 9), op("aten::bmm", 72, 4)]
    loss = [op("_LinearCrossEntropyBackward", 10, 8, tid=2), op("aten::mm", 12, 4, tid=2)]
    found = trace_shares.shares([STEP, *optimizer, *attention, *loss, op("c10d::allreduce_", 30, 6, tid=2)])
    expected = {"optimizer": 0.20, "attention": 0.09, "projection and loss": 0.08, "communication": 0.06}
    assert found == pytest.approx(expected | {trace_shares.HOST: 0.57})


def test_on_a_gpu_kernels_count_by_the_operation_that_launched_them() -> None:
    launch = op("cudaLaunchKernel", 13, 1, "cuda_runtime", correlation=7)
    kernels = [
        op("sm90_gemm", 40, 50, "kernel", tid=9, correlation=7),
        op("flash_attention_fwd", 90, 5, "kernel", tid=9, correlation=8),
        op("void some_kernel", 95, 5, "kernel", tid=9, correlation=9),
    ]
    found = trace_shares.shares([STEP, LINEAR[0], LINEAR[1], launch, *kernels])
    assert found["matrix products"] == pytest.approx(0.50) and found["attention"] == pytest.approx(0.05)
    assert found[trace_shares.OTHER] == pytest.approx(0.05) and found[trace_shares.HOST] == pytest.approx(0.40)


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a trace must hold a step that was kept"):
        trace_shares.shares(LINEAR)
