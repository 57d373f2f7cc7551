"""`python src/plan.py measure=N`: layouts timed on this machine, and the committed record of them in the guide."""

import csv
import json
import os
import resource
import runpy
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from composed import composed as values_of
from entry_points import REPOSITORY, environment

from lmscale.cli import next_command
from lmscale.config.plan import PlanConfig
from lmscale.training import measuring

TINY = ("model=gpt_tiny", "model.num_layers=1", "model.hidden_size=32", "model.vocab_size=400", "data.seq_length=32")
TINY += ("micro_batch_size=2", "global_batch_size=4", "trainer.max_steps=12")
QUIET = ("trainer.num_validation_samples=2", "trainer.progress_bar=false", "logger.tensorboard=false")
# In place of src/train.py: steps as long as the layout says, the first three longer; two tensor ranks fail.
TRAINER = """
import json, pathlib, sys
keys = dict(word.split("=", 1) for word in sys.argv[1:])
assert keys["trainer.stop_after_steps"] == "10" and keys["checkpoint.save_last"] == "false"
if keys["parallel.tp_size"] == "2":
    sys.exit(FAILURE)
seconds = {("1", "2"): 3.0, ("2", "1"): 1.0}[keys["parallel.dp_size"], keys["trainer.num_threads"]]
seconds += "parallel.zero1" in keys
folder = pathlib.Path(keys["hydra.run.dir"])
folder.mkdir()
rows = [f"{step},{100 if step < 4 else seconds + step % 2},0.5" for step in range(1, 11)]
(folder / "metrics.csv").write_text("\\n".join(["step,time/step_s,memory_gib", "0,,", *rows]))
(folder / "config.json").write_text(json.dumps({"compile": False}))
"""


def composed(entry_point: str, *overrides: str) -> dict:
    return values_of(entry_point, *TINY, *overrides)


def question(path: Path, *overrides: str) -> PlanConfig:
    return PlanConfig.from_dict(composed("plan", "cluster=cpu", "measure=4", f"record={path}", *overrides))


def trainer(failure: str = "'error: two is too many'") -> list[str]:
    return [sys.executable, "-c", TRAINER.replace("FAILURE", failure)]


@pytest.fixture
def two_cores(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "count_devices", lambda is_gpu: 2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> bytes:
    """The record of the four layouts of two cores."""
    path = tmp_path_factory.mktemp("measured") / "layouts.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "count_devices", lambda is_gpu: 2)
        measuring.measure_layouts(question(path), trainer())
    return path.read_bytes()


@pytest.fixture
def record(tmp_path, two_cores, measured) -> Path:
    (tmp_path / "layouts.json").write_bytes(measured)
    return tmp_path / "layouts.json"


def test_the_four_layouts_of_two_cores_are_ranked_by_their_time_beside_the_model(record) -> None:
    written = json.loads(record.read_text())
    found = [(measuring.label(layout), layout["threads"], layout["step_time_s"]) for layout in written["layouts"]]
    assert found == [("tp1_dp2", 1, 1.0), ("tp1_dp2_zero1", 1, 2.0), ("tp1_dp1", 2, 3.0)]
    (failed,) = written["failed"]
    assert (measuring.label(failed), failed["threads"], failed["reason"]) == ("tp2_dp1", 1, "two is too many")
    layouts = sorted([*written["layouts"], failed], key=lambda layout: layout["modelled"]["rank"])
    times = [layout["modelled"]["step_time_s"] for layout in layouts]
    assert [layout["modelled"]["rank"] for layout in layouts] == [1, 2, 3, 4] and times == sorted(times)
    for layout in written["layouts"]:
        assert layout["step_times_s"][0] < 100  # without the warm-up
        assert layout["tokens_per_s"] == 4 * 32 / layout["step_time_s"]
        # Of a Python without torch; Linux counts at least what this process had when it started it.
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert 2**20 < layout["memory_bytes"] <= max(2**30, peak)
    table = measuring.format_measured(written, str(record), "python src/train.py")
    rows = [line.split() for line in table.splitlines()[2:5]]
    assert [row[:3] for row in rows] == [["1", "1", "2"], ["2", "1", "2"], ["3", "1", "1"]]
    assert "   failed: parallel.tp_size=2 parallel.dp_size=1 trainer.num_threads=1: two is too many" in table


def test_a_layout_of_fewer_devices_has_no_more_threads(tmp_path, two_cores, monkeypatch) -> None:
    monkeypatch.setattr(measuring, "time_training", lambda *_: {"step_time_s": 1.0, "memory_bytes": 1})
    written = measuring.measure_layouts(question(tmp_path / "layouts.json", "num_devices=1"), [])
    assert [(measuring.label(layout), layout["threads"]) for layout in written["layouts"]] == [("tp1_dp1", 1)]


def test_the_answer_ends_with_the_command_to_train_with_or_is_json(record, monkeypatch, capsys) -> None:
    written, words = json.loads(record.read_text()), []
    monkeypatch.setattr(next_command, "_config_dir", list)
    monkeypatch.setattr(measuring, "measure_layouts", lambda question, train: words.extend(train) or written)
    asked = ["cluster=cpu", "measure=4", f"record={record}", "parallel=auto"]
    plan = runpy.run_path(str(REPOSITORY / "src" / "plan.py"))["plan"]
    plan(composed("plan", *asked) | {"overrides": [*TINY, *asked]})
    assert words == [sys.executable, str(REPOSITORY / "src" / "train.py"), *TINY]
    *_, where, command = capsys.readouterr().out.splitlines()
    assert where == f"record: {record}"
    fastest = ["parallel.tp_size=1", "parallel.dp_size=2", "trainer.num_threads=1"]
    assert command.startswith("train:  ") and shlex.split(command)[3:] == [*TINY, *fastest]
    plan(composed("plan", *asked, "json=true") | {"overrides": [*TINY, *asked]})
    assert json.loads(capsys.readouterr().out) == written


@pytest.mark.parametrize(
    "failure, reason",
    [
        ("print('Traceback', 'MemoryError: much', sep='\\n', file=sys.stderr) or 1", "MemoryError: much"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "ended by SIGKILL"),
        ("3", "exit code 3"),
    ],
)
def test_a_failed_layout_is_listed_with_its_reason(tmp_path, two_cores, failure: str, reason: str) -> None:
    written = measuring.measure_layouts(question(tmp_path / "layouts.json"), trainer(failure))
    assert [layout["reason"] for layout in written["failed"]] == [reason] and len(written["layouts"]) == 3


def _refuse(number: int, frame: object) -> None:
    raise AssertionError("the handler of this process was called")


@pytest.mark.parametrize("number, error", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_the_running_training_and_removes_its_folder(tmp_path, monkeypatch, number, error) -> None:
    """Also one that does not stop at SIGTERM, as in a long step."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measuring, "_GRACE_S", 0.5, raising=False)
    started = tmp_path / "pid"
    code = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(started)!r}).write_text(str(os.getpid()))
os.kill(os.getppid(), {int(number)})
time.sleep(20)
"""
    handlers = {signal.SIGTERM: _refuse, signal.SIGINT: signal.default_int_handler}
    previous = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with pytest.raises(error):
            measuring.time_training([sys.executable, "-c", code], 10, False)
    finally:
        left = {each: signal.signal(each, handler) for each, handler in previous.items()}
    assert left == handlers
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert list(tmp_path.iterdir()) == [started]


def test_a_training_that_cannot_start_leaves_the_handler_of_sigterm() -> None:
    with pytest.raises(FileNotFoundError):
        measuring.time_training(["/nowhere/python"], 10, False)
    assert signal.getsignal(signal.SIGTERM) is not measuring._end


def test_if_every_layout_fails_there_is_no_record(tmp_path, two_cores) -> None:
    asked = question(tmp_path / "layouts.json", "measure=2")
    with pytest.raises(ValueError, match="a layout that trains, but all have failed: no steps"):
        measuring.measure_layouts(asked, [sys.executable, "-c", "raise SystemExit('error: no steps')"])
    assert not (tmp_path / "layouts.json").exists()


def test_the_record_names_machine_versions_and_training(record) -> None:
    written = json.loads(record.read_text())
    config, found = written["config"], written["environment"]
    assert PlanConfig.from_dict(config).model.hidden_size == 32
    assert found["cpu"] and found["device"] == "cpu" and found["versions"]["torch"] and found["memory_bytes"] > 0
    assert written["metrics"]["tp1_dp2/step_time_s"] == {"value": 1.0, "unit": "s"}


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["best=true"], "`measure` must be 0 with `best`, `operations` or a teacher, but is 4"),
        (["record=/tmp"], "`record` must be a file, but /tmp is a folder"),
        (["cluster=dgx2h_v100"], "`cluster` must describe this machine, of 2 cores, with `measure`, but is dgx2h_v100"),
        (["trainer.max_steps=9"], "`trainer.max_steps` must be at least 10 with `measure`, but is 9"),
        (["cluster.num_devices=3", "num_devices=3"], "`num_devices` must be at most the 2 of this machine"),
        (["num_devices=2", "global_batch_size=3"], "divides the model and the batch (`micro_batch_size` 2, `global"),
        (
            ["cluster.memory_gib=1e-4", "cluster.reserved_gib=9e-5"],
            "fits, but even with parallel.tp_size=2 parallel.dp_size=1",
        ),
        (
            ["record=/proc/record.json"],
            "`record` must be in a folder that can be made and written, but /proc/record.json",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_run_starts(two_cores, overrides, message, tmp_path) -> None:
    with pytest.raises(ValueError) as caught:
        measuring.measure_layouts(question(tmp_path / "layouts.json", *overrides), ["no such program"])
    assert message in str(caught.value)


def test_a_training_takes_the_words_of_the_plan_without_its_grid(monkeypatch) -> None:
    monkeypatch.setattr(next_command, "_config_dir", lambda: ["--config-dir", "mine"])
    plan = ["measure=3", "cluster=cpu", "+cluster.watts=2", "record=x", "num_devices=2", "top=1", "json=true"]
    grid = ["parallel=auto", "parallel.tp_size=2", "parallel.pp_size=1", "parallel.dp_size=1", "parallel.zero1=true"]
    kept = ["model=gpt_tiny", "~fidelity", "parallel.shared_memory=false", "micro_batch_size=1", "optimizer.lr=1e-3"]
    assert next_command.of_training(plan + kept + grid) == ["--config-dir", "mine", *kept]


@pytest.mark.slow
@pytest.mark.parametrize("cores, number", [(1, 1), (2, 4)])
def test_a_measured_layout_trains_as_the_printed_command_does(tmp_path, cores: int, number: int) -> None:
    """Real runs; idle threads wait without spinning, so that a busy machine measures them too."""
    path, shown = tmp_path / "layouts.json", environment(OMP_WAIT_POLICY="PASSIVE")
    words = [*TINY, "cluster=cpu", f"num_devices={cores}", f"measure={number}", f"record={path}"]
    done = warm.run([str(REPOSITORY / "src" / "plan.py"), *words], REPOSITORY, shown, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("measuring ") == number and "   failed: " not in done.stdout
    printed = shlex.split(done.stdout.rpartition("train:  ")[2])
    assert printed[1:-3] == ["src/train.py", *TINY] or printed[1:-4] == ["src/train.py", *TINY]
    layouts = json.loads(path.read_text())["layouts"]
    assert len(layouts) == number
    for layout in layouts:
        assert len(layout["step_times_s"]) == 7 and 0 < layout["step_time_s"] < 60
        assert 0.2 * 2**30 < layout["memory_bytes"] < 4 * 2**30
    command = [str(REPOSITORY / "src" / "train.py"), *printed[2:], *QUIET, f"hydra.run.dir={tmp_path / 'run'}"]
    done = warm.run(command, REPOSITORY, shown, timeout=300)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        assert sum(row["train/loss"] != "" for row in csv.DictReader(file)) == 12


def test_a_training_that_is_refused_gives_its_reason(tmp_path) -> None:
    words = [*TINY, "cluster=cpu", "num_devices=2", "measure=1", f"record={tmp_path}/layouts.json"]
    done = warm.run(
        [str(REPOSITORY / "src" / "plan.py"), *words, "schedule.warmup_steps=-1"], REPOSITORY, environment(), 99
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[1:] == [
        "error: `measure` must find a layout that trains, but all have failed: "
        "`schedule.warmup_steps` must be at least 0, but is -1"
    ]


ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "analysis" / "scaling" / "records" / "measured_layouts_cpu.json"


def test_the_guide_shows_the_committed_record() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = record["config"]["rows"]
    page = " ".join((ROOT / "docs" / "guides" / "plan.md").read_text(encoding="utf-8").split())
    for row in rows:
        times = " | ".join(f"{row[name]:.3f}" for name in ("short_s", "long_s", "modelled_s"))
        memory = " | ".join(f"{row[name] / 2**30:.2f}" for name in ("bytes", "modelled_bytes"))
        assert f"| `{row['layout']}` | {row['threads_per_rank']} | {times} | {memory} |" in page
    fastest = [min(rows, key=lambda row: row[f"{name}_s"])["layout"] for name in ("long", "short", "modelled")]
    assert fastest == ["tp1_dp1"] * 3
