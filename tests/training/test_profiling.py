"""`trainer.profiler=torch` leaves a trace and a table for each tensor rank of data rank 0."""

import json

import pytest
from runs import run_jobs, tiny_run

from lmscale.config.training import TrainerConfig


def test_a_trace_and_a_table_of_each_tensor_rank_show_the_steps(tmp_path, capfd) -> None:
    options = {"trainer__profiler": "torch", "trainer__max_steps": 6}
    tensor = tiny_run("gpt", tmp_path / "tensor", **options, parallel__tp_size=2)
    run_jobs([tensor, tiny_run("gpt", tmp_path / "data", **options, parallel__dp_size=2, parallel__zero1=True)], 2)
    assert "options: zero1\nkernels: " in capfd.readouterr().out
    assert {path.name for path in (tmp_path / "data" / "profile").iterdir()} == {"rank_0.json", "rank_0.txt"}
    for rank in range(2):
        events = json.loads((tmp_path / "tensor" / "profile" / f"rank_{rank}.json").read_text())["traceEvents"]
        names = {event.get("name", "") for event in events}
        assert "aten::mm" in names and any("allreduce" in name for name in names)
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert "Self CPU" in (tmp_path / "tensor" / "profile" / f"rank_{rank}.txt").read_text()


@pytest.mark.parametrize("length", [{"max_steps": 5}, {"max_steps": 9, "stop_after_steps": 5}])
def test_a_run_that_ends_before_the_last_traced_step_is_refused(length: dict, tmp_path) -> None:
    name = list(length)[-1]
    with pytest.raises(ValueError, match=f"`{name}` must be at least 6 with `profiler`, but is 5"):
        TrainerConfig(**length, profiler="torch")
    assert TrainerConfig(**length).profiler is None


def test_a_resumed_run_without_a_step_to_trace_says_so(tmp_path, capfd) -> None:
    changes = {"trainer__max_steps": 8, "resume__path": "auto"}
    first = tiny_run("gpt", tmp_path, **changes, trainer__stop_after_steps=5)
    run_jobs([first, tiny_run("gpt", tmp_path, **changes, trainer__profiler="torch")], 1)
    warning = "WARNING: no step was traced: the first 3 steps after a start are not; the run had 3"
    assert warning in capfd.readouterr().err
    assert not list((tmp_path / "profile").iterdir())
