"""The rows of `analysis/benchmarks/h200_rows.py` state which goals are reached and store complete losses."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composed import composed

from analysis.benchmarks import forecast, race
from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.gpu import trace
from lmscale.config import TransformerConfig
from lmscale.planner.params import count_parameters

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("h200_rows", ROOT / "analysis" / "benchmarks" / "h200_rows.py")
rows = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rows)


def write(path: Path, **metrics: float) -> Path:
    path.write_text(
        json.dumps({"metrics": {n.replace("__", "/"): {"value": v, "unit": "u"} for n, v in metrics.items()}})
    )
    return path


def test_a_row_has_the_required_value_and_whether_it_is_reached(tmp_path) -> None:
    record = write(tmp_path / "a.json", ours__share=0.61)
    assert rows.row("gpt", record, "ours/share", 0.6).endswith("0.61 u (required: 0.6)  reached")
    assert rows.row("gpt", record, "ours/share", 0.62).endswith("(required: 0.62)  NOT REACHED")
    other = write(tmp_path / "b.json", ours__share=0.5)
    assert rows.ratio("fp8", record, other, "ours/share", 1.2).endswith("1.22 (required: 1.2)  reached")
    assert rows.ratio("fp8", record, other, "ours/share", 1.23).endswith("(required: 1.23)  NOT REACHED")


def test_the_loss_of_a_run_is_stored_and_compared_with_seeds(tmp_path) -> None:
    write(tmp_path / "record.json")
    (tmp_path / "metrics.csv").write_text("train/loss,time/step_s,memory_gib\n,,\n8.0,9,1\n7.0,2,3\n6.5,4,2\n")
    rows.keep(tmp_path, tmp_path / "kept.json")
    kept = rows.read(tmp_path / "kept.json")
    assert kept["metrics"]["train/loss_fall"]["value"] == 1.5 and kept["train_losses"] == [8.0, 7.0, 6.5]
    assert (kept["metrics"]["train/step"]["value"], kept["metrics"]["train/memory_peak"]["value"]) == (3.0, 3.0)
    name = "train__loss_mean_of_last"
    bf16 = [write(tmp_path / f"{i}.json", **{name: loss}) for i, loss in enumerate((3.0, 3.1, 3.2))]
    assert rows.seeds(write(tmp_path / "near.json", **{name: 3.25}), bf16).endswith("reached")
    assert rows.seeds(write(tmp_path / "far.json", **{name: 3.35}), bf16).endswith("NOT REACHED")


def test_a_non_finite_loss_is_stored_and_not_reached(tmp_path) -> None:
    write(tmp_path / "record.json")
    (tmp_path / "metrics.csv").write_text("train/loss,time/step_s,memory_gib\n8.0,9,1\nnan,2,3\n")
    kept = tmp_path / "kept.json"
    rows.keep(tmp_path, kept)
    assert rows.read(kept)["train_losses"] == [8.0, None]
    assert rows.row("gpt", kept, "train/loss_fall", 0.01).endswith("nan nats/token (required: 0.01)  NOT REACHED")
    with pytest.raises(ValueError, match="train/loss_mean_of_last must be finite, but is nan in"):
        rows.seeds(kept, [kept, kept])


def test_a_record_without_a_required_metric_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys) -> None:
    bare, listed = write(tmp_path / "bare.json", ours__step=1.0), tmp_path / "list.json"
    listed.write_text("[]")
    (tmp_path / "record.json").write_text(bare.read_text())
    (tmp_path / "metrics.csv").write_text("step,train/loss\n")
    mistakes = {
        ("row", "gpt", str(bare), "ours/mfu", "0.5"): "must have the metric ours/mfu, but has not",
        ("row", "gpt", str(listed), "ours/mfu", "0.5"): "must be a record, but has no metrics",
        ("seeds", *[str(bare)] * 3): "has not; a run's record has it from `h200_rows.py keep`",
        ("seeds", *[str(bare)] * 2): "the records in bf16 must be at least 2",
        ("keep", str(tmp_path), str(tmp_path / "kept.json")): "metrics.csv must have a loss, but has none",
    }
    for words, message in mistakes.items():
        monkeypatch.setattr("sys.argv", ["h200_rows.py", *words])
        with pytest.raises(SystemExit) as ended:
            rows.main()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1


CASES = {
    "passed": '<testcase name="a" time="1.5"/>',
    "skipped": '<testcase name="b" time="0"><skipped message="no apex"/></testcase>',
    "failure": '<testcase name="c" time="2"><failure message="x"/></testcase>',
    "error": '<testcase name="d" time="2"><error message="x"/></testcase>',
}


def junit(folder: Path, *cases: str) -> Path:
    path = folder / "junit.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(CASES[case] for case in cases)}</testsuite></testsuites>")
    return path


def test_a_test_run_that_passed_becomes_a_record(tmp_path) -> None:
    record = tmp_path / "record.json"
    assert rows.tests(junit(tmp_path, "passed", "skipped"), record, may_skip=False) == "1 passed, 1 skipped: b"
    found = json.loads(record.read_text())
    assert found["metrics"]["passed"]["value"] == 1
    assert found["tests"]["a"] == {"outcome": "passed", "time_s": 1.5} and found["tests"]["b"]["outcome"] == "skipped"


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (("passed", "failure"), "these failed: c"),
        (("passed", "error"), "these failed: d"),
        (("skipped",), "all 1 were skipped"),
        ((), "all 0 were skipped"),
    ],
)
def test_a_test_run_without_passed_tests_leaves_no_record(tmp_path, cases, message) -> None:
    with pytest.raises(ValueError, match=message):
        rows.tests(junit(tmp_path, *cases), tmp_path / "record.json", may_skip=False)
    assert not (tmp_path / "record.json").exists()


def test_a_missing_package_is_named(monkeypatch) -> None:
    assert rows.imports() == ""
    monkeypatch.setattr(rows, "IMPORTS", ("json", "no_such_package"))
    with pytest.raises(ValueError, match=r"but are not: no_such_package \(No module named 'no_such_package'\)"):
        rows.imports()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"no_such_package.*; pynvml \(No module named 'pynvml'\)"):
        rows.imports()


def test_a_row_has_the_forecast_of_its_card_beside_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "FORECASTS", tmp_path)
    write(tmp_path / "h100_forecast_2.json", gpt__ours__step=0.5, run__train__step=2.0)
    gpt, other = (write(tmp_path / f"{name}.json", ours__step=0.6) for name in ("h100_gpt", "h200_gpt"))
    assert "(required: 0, forecast: 0.5)  reached" in rows.row("gpt", gpt, "ours/step", 0)
    assert "(required: 0)  reached" in rows.row("gpt", other, "ours/step", 0)
    kept = write(tmp_path / "h100_run.json", train__step=2.2, train__optimizer=0.1, train__loss_first=9.0)
    step, optimizer = rows.times(kept).splitlines()
    assert step.endswith(" 2.2 u, forecast: 2") and optimizer.endswith(" 0.1 u")


@pytest.mark.parametrize(("peak", "tensors"), [(41.1, "+2.8 % (required: within 3 %)  reached"), (38.7, "NOT REACHED")])
@pytest.mark.parametrize(("context", "beyond"), [(0.5, "1.90 GiB (required: at most 2)  reached"), (9, "NOT REACHED")])
def test_the_memory_of_a_run_on_a_gpu_is_judged_against_its_plan(tmp_path, peak, tensors, context, beyond) -> None:
    """The tensors against the planned ones, and all that is beyond these against the reserve."""
    taken = {"planned": 40, "peak_allocated": peak, "peak_reserved": 41.4, "context": context}
    run = write(tmp_path / "run.json", **{f"gpu_memory__{name}": size * 2**30 for name, size in taken.items()})
    first, second = rows.times(run).splitlines()
    assert first.endswith(tensors) and second.endswith(beyond)


def test_the_card_of_the_machine_is_named_and_another_one_refused(monkeypatch) -> None:
    memory = SimpleNamespace(total_memory=79.1 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(rows, "_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert rows.card("") == rows.card("h100") == "h100 79.10"
    with pytest.raises(ValueError, match=r"^`CARD` must be h100, .*\(NVIDIA H100 80GB HBM3\), but is h200$"):
        rows.card("h200")
    monkeypatch.setattr(rows, "_device_name", lambda: "NVIDIA L4")
    with pytest.raises(ValueError, match="must be one of H200, H100, A100, V100, but is NVIDIA L4"):
        rows.card("")


def test_weak_scaling_counts_the_parameters_of_each_gpu(tmp_path) -> None:
    config = {"family": "gpt", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    config |= {"max_position_embeddings": 32, "vocab_multiple": 512}
    paths, counts = [], []
    for layers, tp_size, step in ((1, 1, 2.0), (8, 2, 3.0)):
        model = TransformerConfig(**config, num_layers=layers)
        path = write(tmp_path / f"{tp_size}.json", train__step=step)
        described = {"name": "run", "global_batch_size": 8, "model": model.to_dict()}
        values = {"config": described, "layout": {"tp_size": tp_size}, "environment": {"device": "H100"}}
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        paths.append(path)
        counts.append(count_parameters(model).total)
    rows.scaling(tmp_path / "figure_5.json", paths)
    found = {name: entry["value"] for name, entry in rows.read(tmp_path / "figure_5.json")["metrics"].items()}
    expected = 100 * counts[1] / counts[0] / 2 * 2 / 3
    assert found == {"figure_5/mp/1_gpu": 100.0, "figure_5/mp/2_gpus": pytest.approx(expected)}
    with pytest.raises(ValueError, match="must begin with one GPU"):
        rows.scaling(tmp_path / "figure_5.json", paths[1:])


def test_what_the_script_writes_is_compared(tmp_path, monkeypatch) -> None:
    """Records of each kind, by the functions that write them, as on a GPU."""
    record = json.loads(forecast.RECORD.read_text(encoding="utf-8"))
    values = composed("bench", "model=gpt_1.2b", "precision=bf16", "peers=[]", "peak_tflops_per_s=790")
    bench = BenchConfig.from_dict(values)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    raced = race._record(
        bench, torch.device("cuda"), {"ours": [[0.5]]}, {"ours": [4.0]}, {"ours": 60.0}, {"ours": "flash"}
    )
    events = [{"name": "aten::sum", "cat": "cpu_op", "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 50 * 2**30)
    traced = trace._record(bench, "NVIDIA H200", events, {})
    for name, written in (("gpt_1.2b_bf16_batch_512", raced), ("trace_gpt_1.2b", traced)):
        (tmp_path / f"h200_{name}.json").write_text(json.dumps(written), encoding="utf-8")
    lines = "train/loss,time/step_s,memory_gib\n9,60,100\n8,4,120\n7,2,110\n8,3,120\n"
    (tmp_path / "metrics.csv").write_text(lines, encoding="utf-8")
    (tmp_path / "record.json").write_text('{"metrics": {}}', encoding="utf-8")
    rows.keep(tmp_path, tmp_path / "h200_gpt_8.3b_20_steps.json")
    compared = {tuple(line.split()[:2]) for line in forecast.compare(record, tmp_path).splitlines()[1:]}
    assert compared == {
        *(("gpt_1.2b_bf16_batch_512", f"ours/{metric}") for metric in ("step", "share_of_given_peak", "memory_peak")),
        *(("trace_gpt_1.2b", metric) for metric in ("memory_peak", "launches", "host_syncs")),
        *(("gpt_8.3b_20_steps", f"train/{metric}") for metric in ("step", "memory_peak")),
    }
    kept = rows.read_metric(tmp_path / "h200_gpt_8.3b_20_steps.json", "train/step")
    assert kept == {"value": 2.5, "unit": "s"}
