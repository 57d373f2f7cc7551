"""`python src/plan.py measure=N` and `parallel=measured`: layouts timed on this machine, their record, and its use."""

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
from entry_points import REPOSITORY, environment, refuse

from lmscale.cli import next_command
from lmscale.config.plan import PlanConfig
from lmscale.config.pretrain import RunConfig
from lmscale.training import measured_layout, measuring
from lmscale.training.measured_layout import digest
from lmscale.training.resolve import resolve

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
    for module in (measuring, measured_layout):
        monkeypatch.setattr(module, "count_devices", lambda is_gpu: 2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> bytes:
    """The record of the four layouts of two cores."""
    path = tmp_path_factory.mktemp("measured") / "layouts.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "count_devices", lambda is_gpu: 2)
        patch.setattr(measured_layout, "count_devices", lambda is_gpu: 2)
        measuring.measure_layouts(question(path), trainer())
    return path.read_bytes()


@pytest.fixture
def record(tmp_path, two_cores, measured) -> Path:
    (tmp_path / "layouts.json").write_bytes(measured)
    return tmp_path / "layouts.json"


def taken(record: Path, *overrides: str) -> RunConfig:
    given = composed("train", *QUIET, "parallel=measured", f"parallel.record={record}", *overrides)
    return RunConfig.from_dict(given | {"run_dir": str(record.parent / "run")})


def refusal(record: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(taken(record, *overrides))
    return str(caught.value)


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


def test_if_every_layout_fails_there_is_no_record(tmp_path, two_cores) -> None:
    asked = question(tmp_path / "layouts.json", "measure=2")
    with pytest.raises(ValueError, match="a layout that trains, but all have failed: no steps"):
        measuring.measure_layouts(asked, [sys.executable, "-c", "raise SystemExit('error: no steps')"])
    assert not (tmp_path / "layouts.json").exists()


def test_the_record_names_machine_versions_and_training(record) -> None:
    written = json.loads(record.read_text())
    config, found = written["config"], written["environment"]
    assert written["config_digest"] == digest(config)
    assert (config["processor"], config["number of devices"], config["gpu"]) == (found["cpu"], 2, None)
    assert config["model.hidden_size"] == 32 and config["precision"] == "fp32" and config["compile"] is False
    assert found["versions"]["torch"] and found["memory_bytes"] > 0
    assert written["metrics"]["tp1_dp2/step_time_s"] == {"value": 1.0, "unit": "s"}


def test_a_run_takes_the_fastest_measured_layout(record) -> None:
    """What the ranks get is the job of the explicit layout, except for the request itself."""
    measured, fastest = resolve(taken(record)), ("parallel.dp_size=2", "trainer.num_threads=1")
    explicit = resolve(RunConfig.from_dict(composed("train", *QUIET, *fastest) | {"run_dir": measured.run.run_dir}))
    assert (measured.layout, measured.batch, measured.model) == (explicit.layout, explicit.batch, explicit.model)
    assert (measured.layout.tp_size, measured.layout.dp_size, measured.layout.zero1) == (1, 2, False)
    assert measured.num_threads == explicit.num_threads == 1
    assert measured.run.parallel.record == str(record) and measured.corpus == explicit.corpus


def test_a_run_takes_the_options_of_the_fastest_layout(record) -> None:
    written = json.loads(record.read_text())
    written["layouts"] = written["layouts"][1:]
    record.write_text(json.dumps(written))
    layout = resolve(taken(record)).layout
    assert (layout.tp_size, layout.dp_size, layout.zero1) == (1, 2, True)


@pytest.mark.parametrize(
    "override, difference",
    [
        ("model.hidden_size=64", "model.hidden_size 32 instead of 64"),
        ("model.hidden_dropout=0.2", "model.hidden_dropout 0.1 instead of 0.2"),
        ("data.seq_length=16", "data.seq_length 32 instead of 16"),
        ("micro_batch_size=1", "micro_batch_size 2 instead of 1"),
        ("global_batch_size=8", "global_batch_size 4 instead of 8"),
        ("precision=bf16", "precision 'fp32' instead of 'bf16'"),
        ("optimizer.moments=bf16", "optimizer.moments 'fp32' instead of 'bf16'"),
        ("trainer.matmul_precision=highest", "trainer.matmul_precision 'high' instead of 'highest'"),
        ("compile=true", "compile False instead of True"),
        ("parallel.zero1=true", "parallel.zero1 False instead of True"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel False instead of True"),
        ("parallel.pad_heads=true", "parallel.pad_heads False instead of True"),
        ("trainer.num_threads=2", "trainer.num_threads 1 instead of 2"),
    ],
)
def test_the_record_of_another_training_is_refused_with_what_differs(record, override: str, difference: str) -> None:
    message = refusal(record, override)
    assert message == (
        f"`parallel.record` must be of this training on this machine, but {record} was measured with {difference}; "
        "measure again with `python src/plan.py measure=N`"
    )


def test_the_record_of_another_machine_is_refused(record, monkeypatch) -> None:
    monkeypatch.setattr(measured_layout, "count_devices", lambda is_gpu: 3)
    assert "was measured with number of devices 2 instead of 3; measure" in refusal(record)
    monkeypatch.setattr(measured_layout, "cpu_model", lambda: "Z80")
    assert "instead of 'Z80', number of devices 2 instead of 3; measure" in refusal(record)


def test_the_vocabulary_of_another_tokenizer_is_refused(tmp_path, two_cores) -> None:
    path = tmp_path / "layouts.json"
    measuring.measure_layouts(question(path, "model.vocab_size=null"), trainer())
    assert resolve(taken(path, "model.vocab_size=null")).layout.dp_size == 2
    message = refusal(path, "model.vocab_size=null", "tokenizer.vocab_size=500")
    assert "was measured with the vocabulary of tokenizer=trained; measure" in message


def test_a_missing_a_foreign_and_an_edited_record_are_refused(record) -> None:
    rule = "`parallel.record` must be what `python src/plan.py measure=N` has written, but"
    assert refusal(record.parent / "none.json") == f"{rule} {record.parent / 'none.json'} does not exist"
    written = json.loads(record.read_text())
    written["config"]["micro_batch_size"] = 1
    for text in (json.dumps(written), "{}", "[]", json.dumps(written | {"layouts": []})):
        record.write_text(text)
        assert refusal(record) == f"{rule} {record} is something else or was edited"
    record.write_text("{")
    assert refusal(record).startswith(f"{rule} {record} cannot be read: ")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["best=true"], "`measure` must be 0 with `best` or `operations`, but is 4"),
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
        (
            ["parallel=measured"],
            "`parallel.record` must be null outside src/train.py, but is 'outputs/measured_layouts",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_run_starts(two_cores, overrides, message, tmp_path) -> None:
    with pytest.raises(ValueError) as caught:
        measuring.measure_layouts(question(tmp_path / "layouts.json", *overrides), ["no such program"])
    assert message in str(caught.value)


def test_sizes_beside_the_record_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="`parallel.tp_size` must be auto with .* but is 2"):
        taken(tmp_path / "layouts.json", "parallel.tp_size=2")


@pytest.mark.parametrize(
    "command",
    [
        ("src/train.py", *TINY, *QUIET, "parallel=measured"),
        ("finetune/run.py", "task=mnli", "ckpt=none", "parallel=measured"),
        ("src/plan.py", "parallel=measured"),
    ],
)
def test_a_refused_record_is_one_line_and_exit_code_2(command, tmp_path) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    done = refuse(REPOSITORY / command[0], *command[1:], folder, f"parallel.record={tmp_path}/none")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: `parallel.record` must be ") and "none" in done.stderr


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
    losses = []
    for name, choice in {
        "explicit": printed[2:],
        "measured": [*TINY, "parallel=measured", f"parallel.record={path}"],
    }.items():
        run = tmp_path / name
        command = [str(REPOSITORY / "src" / "train.py"), *choice, *QUIET, f"hydra.run.dir={run}"]
        done = warm.run(command, REPOSITORY, shown, timeout=300)
        assert done.returncode == 0, done.stderr
        assert (f"; the fastest of {path}; " in done.stdout) == (name == "measured")
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            losses.append([row["train/loss"] for row in csv.DictReader(file)])
    assert losses[0] == losses[1] and len(losses[0]) >= 12


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
