"""What `analysis/benchmarks/h200.sh` writes has the names of the forecast."""

import json

import torch
from composed import composed
from torch.profiler import ProfilerActivity, profile

from analysis.benchmarks import forecast, h200_rows, race
from analysis.benchmarks.config import BenchConfig
from analysis.benchmarks.gpu import trace


def test_what_the_script_writes_is_compared(tmp_path, monkeypatch) -> None:
    """Records of each kind, by the functions that write them, as on a GPU."""
    record = json.loads(forecast.RECORD.read_text(encoding="utf-8"))
    values = composed("bench", "model=gpt_1.2b", "precision=bf16", "peers=[]", "peak_tflops_per_s=790")
    bench = BenchConfig.from_dict(values)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    raced = race._record(bench, torch.device("cuda"), {"ours": [[0.5]]}, {"ours": [4.0]}, {"ours": 60.0})
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).sum()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 50 * 2**30)
    traced = trace._record(bench, "NVIDIA H200", profiler, {})
    for name, written in (("gpt_1.2b", raced), ("trace_gpt_1.2b", traced)):
        (tmp_path / f"h200_{name}.json").write_text(json.dumps(written), encoding="utf-8")
    rows = "train/loss,time/step_s,memory_gib\n9,60,100\n8,4,120\n7,2,110\n8,3,120\n"
    (tmp_path / "metrics.csv").write_text(rows, encoding="utf-8")
    (tmp_path / "record.json").write_text('{"metrics": {}}', encoding="utf-8")
    h200_rows.keep(tmp_path, tmp_path / "h200_gpt_8.3b_20_steps.json")
    compared = {tuple(line.split()[:2]) for line in forecast.compare(record, tmp_path).splitlines()[1:]}
    assert compared == {
        *(("gpt_1.2b", f"ours/{metric}") for metric in ("step", "share_of_given_peak", "memory_peak")),
        *(("trace_gpt_1.2b", metric) for metric in ("memory_peak", "launches", "host_syncs")),
        *(("gpt_8.3b_20_steps", f"train/{metric}") for metric in ("step", "memory_peak")),
    }
    kept = h200_rows.read_metric(tmp_path / "h200_gpt_8.3b_20_steps.json", "train/step")
    assert kept == {"value": 2.5, "unit": "s"}
