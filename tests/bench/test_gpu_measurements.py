"""Measurements on a GPU: attention backends compared on equal inputs, traces joined with the plan, clocks."""

import gzip
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.forecast import cluster_of
from analysis.benchmarks.gpu import attention_backends, operations, products, trace
from analysis.benchmarks.gpu import device as gpu_device
from analysis.benchmarks.gpu.attention_backends import AttentionShape, relative_errors, time_backends
from analysis.benchmarks.gpu.device import median_time_s, require_device
from lmscale.config import Layout
from lmscale.planner.plan import Plan

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


class Chrome:
    """A Chrome trace as torch.profiler writes it on a GPU (kineto's output_json.cpp and CuptiActivity.cpp): the host's
    events by thread and time, and kernels that a correlation id ties to the call that launched them."""

    def __init__(self) -> None:
        self.events = [{"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}}]
        self.events.append({"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "tid": "x", "ts": 0, "dur": 9})
        self.time = 0

    def add(self, cat: str, name: str, start: float, dur: float, tid: int = 1, **args) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": dur, "args": args}
        self.events.append(event)

    @contextmanager
    def within(self, name: str, tid: int = 1, cat: str = "cpu_op", **args) -> Iterator[None]:
        """An event of the host around what is added meanwhile."""
        start, self.time = self.time, self.time + 1
        yield
        self.time += 1
        self.add(cat, name, start, self.time - start, tid, **{"External id": start} | args)

    def launch(self, kernel: str, seconds: float, tid: int = 1, call: str = "cudaLaunchKernel") -> None:
        correlation = len(self.events)
        cat = "cuda_driver" if call.startswith("cu") and not call.startswith("cuda") else "cuda_runtime"
        self.add(cat, call, self.time, 1, tid, cbid=211, correlation=correlation)
        self.time += 1
        sizes = {"grid": [132, 1, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 0}
        ids = {"External id": 0, "device": 0, "context": 1, "stream": 7, "correlation": correlation}
        self.add("kernel", kernel, self.time + 5, 1e6 * seconds, 7, **ids, **sizes)

    def write(self, path: Path) -> Path:
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({"schemaVersion": 1, "traceEvents": self.events}, file)
        return path


TOKENS, HIDDEN = 2 * 48, 64
MODEL = {"family": "gpt", "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "vocab_size": 1000}
MODEL |= {"max_position_embeddings": 48}
HALF = "c10::BFloat16"


def bench_of(**changes) -> BenchConfig:
    values = {"model": MODEL, "precision": {"dtype": "bf16"}, "micro_batch_size": 2, "peers": [], "steps_per_round": 2}
    return BenchConfig.from_dict(values | {"accelerator": "cpu", "num_threads": 1} | changes)


def step_on_a_gpu(chrome: Chrome, float8: bool = False) -> None:
    """Some of a step's work: two layers forward, one backward, loss, gradient buffer and optimizer."""
    graph = "## Call CompiledFxGraph flayer ##"
    for _ in range(2):
        with chrome.within("Torch-Compiled Region: 1/0"), chrome.within(graph, cat="user_annotation"):
            with chrome.within("triton_red_fused_native_layer_norm_0", **shapes([2, 48, HIDDEN], [HIDDEN], [])):
                chrome.launch("triton_red_fused_native_layer_norm_0", 2e-6, call="cuLaunchKernelEx")
            if float8:
                with chrome.within("aten::_scaled_mm", **shapes([TOKENS, HIDDEN], [HIDDEN, 3 * HIDDEN], [], [])):
                    chrome.launch("nvjet_qqtst", 5e-6)
            else:
                with chrome.within("aten::addmm", **shapes([3 * HIDDEN], [TOKENS, HIDDEN], [HIDDEN, 3 * HIDDEN])):
                    chrome.launch("nvjet_tst_128x256_TNT", 7e-6, call="cudaLaunchKernelExC")
                    chrome.launch("cublasLt::splitKreduce_kernel", 1e-6)
            name = "aten::_scaled_dot_product_flash_attention"
            with chrome.within(name), chrome.within("aten::_flash_attention_forward"):
                chrome.launch("flash_fwd_kernel", 2.5e-6)
    with chrome.within("_LinearCrossEntropy"):
        with chrome.within("aten::mm", **shapes([TOKENS, HIDDEN], [HIDDEN, 1024])):
            chrome.launch("nvjet_logits", 4e-6)
        with chrome.within("Torch-Compiled Region: 2/0"):
            chrome.launch("triton_red_fused_exp_sum_1", 1e-6)
    for name in ("CompiledFunctionBackward", "torch::autograd::AccumulateGrad"):
        with chrome.within(f"autograd::engine::evaluate_function: {name}", tid=2):
            if name.startswith("Compiled"):
                with chrome.within("aten::mm", tid=2, **shapes([3 * HIDDEN, TOKENS], [TOKENS, HIDDEN])):
                    chrome.launch("nvjet_tst_64x64_NTN", 6e-6, tid=2)
            else:
                chrome.launch("vectorized_elementwise_kernel", 1e-6, tid=2)
    with chrome.within("Optimizer.step#MixedPrecisionAdamW.step", cat="user_annotation"):
        chrome.launch("triton_poi_fused_adamw_2", 9e-6, call="cuLaunchKernel")
    with chrome.within("aten::item"), chrome.within("aten::_local_scalar_dense"):
        chrome.add("cuda_runtime", "cudaStreamSynchronize", chrome.time, 1, correlation=len(chrome.events))


def shapes(*dims: list[int]) -> dict:
    return {"Input Dims": list(dims), "Input type": [HALF if each else "Scalar" for each in dims]}


def events_of(tmp_path: Path, **changes) -> list[dict]:
    """The events of two such steps."""
    chrome = Chrome()
    for _ in range(2):
        step_on_a_gpu(chrome, **changes)
    return operations.read_trace(chrome.write(tmp_path / "gpu.trace.json.gz"))


def test_kernels_launches_and_waits_are_counted_per_step(tmp_path) -> None:
    record = trace._record(bench_of(), "NVIDIA H200", events_of(tmp_path), {"optimizer.py:7": 1})
    values = {name: entry["value"] for name, entry in record["metrics"].items()}
    assert (values["kernels"], values["launches"], values["host_syncs"], values["host_reads"]) == (13, 13, 1, 1)
    assert values["kernel_time"] == pytest.approx(46e-6)
    assert record["syncs"] == {"cudaStreamSynchronize": 2, "aten::_local_scalar_dense": 2}
    assert record["sync_places"] == {"optimizer.py:7": 1}
    assert sum(row["s"] for row in record["operations"]) == pytest.approx(values["kernel_time"])


def test_kernels_are_joined_with_the_planned_operations(tmp_path) -> None:
    """Times, launches and rates of each row; a product by its shape, whichever operand was transposed."""
    job, cluster = trace._job(bench_of()), cluster_of("h200")
    rows = operations.join(events_of(tmp_path), job, cluster, 2)
    found = {(row["phase"], row["work"]): row for row in rows}
    assert [(key, row["launches"], round(1e6 * row["s"])) for key, row in found.items() if row["launches"]] == [
        (("forward", "96x192x64"), 4, 16),
        (("optimizer", "all"), 1, 9),
        (("backward", "64x192x96"), 1, 6),
        (("forward", "attention"), 2, 5),
        (("forward", "in the layers"), 2, 4),
        (("forward", "96x1024x64"), 1, 4),
        (("forward", "loss"), 1, 1),
        (("gradients", "all"), 1, 1),
    ]
    qkv, weight = found["forward", "96x192x64"], found["backward", "64x192x96"]
    assert (qkv["operations"], weight["operations"]) == (["QKV"], ["QKV, gradient of the weight"])
    assert qkv["launches_modelled"] == 2 and qkv["tflop"] == pytest.approx(2 * 2 * 96 * 192 * 64 / 1e12)
    assert qkv["tflops"] == pytest.approx(qkv["tflop"] / 16e-6)
    assert [kernel["name"] for kernel in qkv["kernels"]] == ["nvjet_tst_128x256_TNT", "cublasLt::splitKreduce_kernel"]
    (norm,) = found["forward", "in the layers"]["kernels"]
    assert norm["gb"] == pytest.approx(2 * 2 * (TOKENS * HIDDEN + HIDDEN) / 1e9)
    planned = sum(row.seconds for row in Plan(job, Layout(), cluster).rows if row.part != "host")
    assert sum(row["s_modelled"] for row in rows) == pytest.approx(planned)
    assert f"{'forward':<10}{'96x192x64':<20}{4:<9}{2:<7}{'0.02':<9}" in operations.describe(rows)


def test_a_float8_product_is_joined_by_its_shape(tmp_path) -> None:
    job = trace._job(bench_of(precision={"dtype": "fp8"}))
    rows = operations.join(events_of(tmp_path, float8=True), job, cluster_of("h200"), 2)
    (qkv,) = [row for row in rows if row["operations"] == ["QKV"]]
    assert (qkv["launches"], qkv["launches_modelled"], qkv["kernels"][0]["name"]) == (2, 2, "nvjet_qqtst")
    assert any("rounding to float8" in row["operations"] and row["work"] == "in the layers" for row in rows)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_the_products_of_a_traced_cpu_step_are_those_of_the_plan(tmp_path, family) -> None:
    """A real trace, eager, with exact attention, of two micro-batches: every product of a layer in its row."""
    model = MODEL | {"family": family, "attention": "exact"}
    bench = bench_of(model=model, compiles=False, global_batch_size=4, warm_up_steps=1)
    record = trace.trace(bench, tmp_path / "cpu.trace.json.gz")
    layers = [row for row in record["operations"] if row["operations"] and row["work"][0].isdigit()]
    layers = [row for row in layers if not row["operations"][0].startswith("logits")]
    assert len(layers) == 11  # of twelve products two have one shape
    for row in layers:
        calls = sum(kernel["launches"] for kernel in row["kernels"] if kernel["name"] in ("aten::mm", "aten::addmm"))
        assert calls == row["launches_modelled"] > 0, row["operations"]
    kinds = {(row["phase"], row["work"]) for row in record["operations"] if row["s"] > 0}
    assert kinds >= {("forward", "attention"), ("backward", "attention"), ("optimizer", "all"), ("gradients", "all")}
    assert sum(row["s"] for row in record["operations"]) == pytest.approx(record["metrics"]["kernel_time"]["value"])
    assert all(row["operations"] for row in record["operations"])  # BERT's heads too, whose rows differ by batch


def test_the_products_of_a_step_are_those_of_the_plan_in_their_layouts() -> None:
    shapes = products.Shape.of_step("gpt_1.2b:32:bf16")
    t, h = 32 * 1024, 1536
    assert shapes[products.Shape(t, 3 * h, h, "nt", False)] == ["QKV"]
    assert shapes[products.Shape(t, h, 4 * h, "nn", False)] == ["MLP up, gradient of the input"]
    assert shapes[products.Shape(h, 4 * h, t, "tn", False)] == ["MLP down, gradient of the weight"]
    assert len(shapes) == 15 and {shape.transposed for shape in shapes} == {"nt", "nn", "tn"}
    eighths = products.Shape.of_step("gpt_2.5b:8:fp8")
    assert sum(shape.float8 for shape in eighths) == 12 and len(eighths) == 15
    assert not any("head" in name for names in products.Shape.of_step("bert_336m:128:bf16").values() for name in names)


@pytest.mark.parametrize("transposed", ["nt", "nn", "tn"])
def test_every_kind_of_product_is_right_and_stored_as_it_says(transposed) -> None:
    torch.manual_seed(1)
    shape = products.Shape(32, 48, 16, transposed, True)
    for kind in products.KINDS["fp8"]:
        product = products.make_product(shape, kind, CPU)
        a, b = product.args
        out = product().float()
        torch.testing.assert_close(out, a.float() @ b.float(), rtol=0.02, atol=0.02)
        assert out.shape == (32, 48)
        stored = ("t" if a.stride(0) == 1 else "n") + ("t" if b.stride(0) == 1 else "n")
        assert stored == (transposed if kind == "bf16" else "nt")  # float8's kernels have no other


def test_a_sustained_rate_is_that_of_the_second_half(monkeypatch) -> None:
    monkeypatch.setattr(products, "median_time_s", lambda *_: 0.05)
    clock = iter([0.0, *(t for start, end in ((0, 1), (1, 3), (3, 6), (6, 10)) for t in (start, end)), 10.0])
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))
    calls = []
    assert products.sustained_s(lambda: calls.append(1), CPU, 10.0) == (0.05, 3.5)
    assert len(calls) == 4


def test_clocks_are_sampled_while_work_runs_and_summed_up_between_two_times(monkeypatch) -> None:
    fake = SimpleNamespace(
        __spec__=object(),
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-1a": 0}.get,
        NVMLError=OSError,
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 1830, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda _: 698_500,
        nvmlDeviceGetTemperature=lambda *_: 61,
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: 0x4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu_device, "PERIOD_S", 0.001)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1a"))
    with gpu_device.sampled_clocks(torch.device("cuda")) as samples:
        while len(samples) < 3:
            time.sleep(0.001)
    count = len(samples)
    time.sleep(0.01)
    assert len(samples) == count  # the thread has ended
    samples = [samples[0]._replace(time_s=float(place), sm_mhz=1000 * place, reasons=4 * place) for place in range(5)]
    found = {name: entry["value"] for name, entry in gpu_device.clock_metrics(samples, 1.0, 3.0).items()}
    assert (found["sm_mhz"], found["memory_mhz"], found["power_w"], found["celsius"]) == (2000, 3201, 698.5, 61)
    lowered = (found[f"lowered_by_{reason}"] for reason in ("power_cap", "hardware", "thermal_hardware"))
    assert tuple(lowered) == pytest.approx((2 / 3, 2 / 3, 0))
    with gpu_device.sampled_clocks(CPU) as samples:
        pass
    assert samples == [] and gpu_device.clock_metrics(samples) == {}


def test_a_measurement_goes_on_where_the_clocks_cannot_be_read(monkeypatch, capsys) -> None:
    def refuse() -> None:
        raise OSError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(__spec__=object(), nvmlInit=refuse, NVMLError=OSError))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1a"))
    with gpu_device.sampled_clocks(torch.device("cuda")) as samples:
        pass
    assert samples == [] and "NVML Shared Library Not Found" in capsys.readouterr().out
