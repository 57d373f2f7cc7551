"""Shares of a trace by kind of work: self time, regions before names, kernels by their launches; the record."""

import json
import time

import pytest

from analysis.benchmarks import trace_shares


def op(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: int) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": tid, "args": args}


STEP = op("ProfilerStep#3", 0, 100, "user_annotation")
LINEAR = [op("aten::linear", 10, 30), op("aten::addmm", 12, 20), op("aten::copy_", 14, 4)]


def test_an_operation_counts_with_its_self_time_and_gaps_are_separate() -> None:
    found = trace_shares.shares([STEP, *LINEAR, {"ph": "M", "name": "process_name"}])
    expected = {"matrix products": 0.16, "casts and copies": 0.04, trace_shares.OTHER: 0.10, trace_shares.HOST: 0.70}
    assert found == pytest.approx(expected)
    assert list(found.values()) == sorted(found.values(), reverse=True) and sum(found.values()) == pytest.approx(1)


def test_a_region_counts_in_full_on_every_thread() -> None:
    optimizer = [op("Optimizer.step#AdamW.step", 50, 20, "user_annotation"), op("aten::mul", 52, 5)]
    attention = [op("aten::scaled_dot_product_attention", 71, 9), op("aten::bmm", 72, 4)]
    loss = [op("_LinearCrossEntropyBackward", 10, 8, tid=2), op("aten::mm", 11, 4, tid=2)]
    loss.append(op("aten::copy_", 15, 1, tid=2))
    found = trace_shares.shares([STEP, *optimizer, *attention, *loss, op("c10d::allreduce_", 30, 6, tid=2)])
    expected = {"optimizer": 0.20, "attention": 0.09, "communication": 0.06}
    expected |= {trace_shares.PROJECTION: 0.04, trace_shares.LOSS: 0.03, trace_shares.LOGITS_COPIED: 0.01}
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


def test_tens_of_thousands_of_kernels_take_seconds() -> None:
    def seconds(number: int) -> float:
        events = [op("ProfilerStep#3", 0, 1e6, "user_annotation")]
        for i in range(number):
            events.append(op("aten::mm", i * 10, 5))
            events.append(op("cudaLaunchKernel", i * 10 + 1, 1, "cuda_runtime", correlation=i))
            events.append(op("gemm", i * 10 + 3, 5, "kernel", tid=9, correlation=i))
        started = time.process_time()
        assert set(trace_shares.shares(events)) == {"matrix products", trace_shares.HOST}
        return time.process_time() - started

    assert seconds(20_000) < 5  # 0.5 s; quadratic time would be 20 s


def run_main(monkeypatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["trace_shares.py", *map(str, words)])
    return trace_shares.main()


def test_a_missing_file_no_trace_and_a_trace_without_a_step_are_one_line(tmp_path, monkeypatch, capsys) -> None:
    texts = {"none.json": None, "text.json": "x", "list.json": "[]", "other.json": "{}"}
    mistakes = dict.fromkeys(texts, "`trace` must be a Chrome trace, but ")
    texts["bare.json"] = json.dumps({"traceEvents": LINEAR})
    mistakes["bare.json"] = "a trace must hold a step that was kept"
    for name, message in mistakes.items():
        if texts[name] is not None:
            (tmp_path / name).write_text(texts[name])
        assert run_main(monkeypatch, tmp_path / name) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_the_record_describes_the_traced_run(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "profile").mkdir()
    trace, record = tmp_path / "profile" / "rank_0.json", tmp_path / "shares.json"
    trace.write_text(json.dumps({"traceEvents": [STEP, *LINEAR]}))
    assert run_main(monkeypatch, trace, "--record", record) == 2
    assert "error: `trace` must be in a run folder for a record" in capsys.readouterr().err
    about = {"config": {"model": {"architecture": "gpt"}}, "seed": 5, "layout": {"tp_size": 1}, "steps": [0, 6]}
    (tmp_path / "record.json").write_text(json.dumps(about | {"environment": {"cpu": "that one"}}))
    assert run_main(monkeypatch, trace, "--record", record) == 0
    written = json.loads(record.read_text())
    assert written["metrics"]["matrix products"] == {"value": 0.16, "unit": "of the traced time"}
    assert {key: written[key] for key in ("name", "seed", "steps")} == {
        "name": "profile_gpt",
        "seed": 5,
        "steps": [0, 6],
    }
    assert written["environment"] == {"cpu": "that one"} and written["config"] == about["config"]
