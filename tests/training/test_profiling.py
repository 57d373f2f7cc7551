"""`trainer.profiler=torch` leaves a trace and a table for each rank."""

import json

import pytest
from runs import run_jobs, tiny_run


def test_a_trace_and_a_table_show_the_steps(tmp_path) -> None:
    run_jobs([tiny_run("gpt", tmp_path, trainer__profiler="torch", trainer__max_steps=7, parallel__tp_size=2)], 2)
    for rank in range(2):
        events = json.loads((tmp_path / "profile" / f"rank_{rank}.json").read_text())["traceEvents"]
        names = {event.get("name", "") for event in events}
        assert "aten::mm" in names and any("allreduce" in name for name in names)
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert "Self CPU" in (tmp_path / "profile" / f"rank_{rank}.txt").read_text()


def test_another_profiler_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="`trainer.profiler` must be torch or null, but is 'cprofile'"):
        tiny_run("gpt", tmp_path, trainer__profiler="cprofile")
