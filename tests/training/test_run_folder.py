"""The first lines that a run prints, its port, and its folder: one job at a time, also after kill -9."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import run_jobs, tiny_run, train_here

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.cli import next_command
from lmscale.config import Layout
from lmscale.results import METRICS
from lmscale.runtime import run_lock
from lmscale.runtime.exit_codes import INTERRUPTED, USER_ERROR
from lmscale.runtime.interruption import Interruption
from lmscale.runtime.run_lock import RunLock, check_not_in_use
from lmscale.shared_files import lock
from lmscale.training import announcement, resuming
from lmscale.training.announcement import describe_options, describe_scored, warn_of_cost
from lmscale.training.loggers import MetricsFile
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.run_folder import prepare_folder


@pytest.mark.parametrize(
    "sizes, line",
    [
        ((2, 2), "options: sequence parallelism, zero1, recompute full, moments in bf16\n"),
        (
            (1, 1),
            "options: sequence parallelism (without effect: tp_size is 1), zero1 (without effect: dp_size is 1), "
            "recompute full, moments in bf16\n",
        ),
    ],
)
def test_the_first_lines_name_each_option_and_whether_it_is_active(sizes: tuple[int, int], line: str, tmp_path) -> None:
    run = tiny_run("gpt", tmp_path, optimizer__moments="bf16", precision__dtype="fp32", model__recompute="full")
    layout = Layout(tp_size=sizes[0], dp_size=sizes[1], sequence_parallel=True, zero1=True)
    assert describe_options(run, run.model.resolve(100), layout) == line
    for name, of_base in (("mup", "2 x the width"), ("completep", "2 x the width and 1 x the depth")):
        scaled = {"parametrization": name, "base_hidden_size": run.model.hidden_size // 2}
        model = dataclasses.replace(run.model.resolve(100), **scaled)
        assert describe_options(run, model, layout).startswith(f"options: {name} ({of_base} of its base), sequence")
    plain = tiny_run("gpt", tmp_path)
    assert describe_options(plain, plain.model.resolve(100), Layout(tp_size=sizes[0], dp_size=sizes[1])) == ""


def test_a_validation_that_costs_much_of_the_training_is_announced(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(announcement, "describe_repetition", lambda corpus, num_tokens: "")

    def warning(num_scored: int) -> str:
        warn_of_cost(run, num_scored)
        return capsys.readouterr().err

    every = {"trainer__validate_every_steps": 1000, "trainer__max_steps": 5000, "global_batch_size": 512}
    every["trainer__max_validation_share"] = 0.05
    request = tiny_run("gpt", tmp_path, **every)
    run = SimpleNamespace(request=request, num_validation_samples=76_800, on_gpu=True, corpus=None)
    assert warning(68_507 * 512 // 29) == (  # the paper's corpus, Table 2
        "WARNING: `trainer.num_validation_samples` must be at most 76,800 with trainer.max_validation_share=0.05, but "
        "1,209,502 sequences take 78.7% of the time of the 1,000 training steps between validations\n"
    )
    assert warning(76_800) == describe_scored(run, 76_800) == ""
    assert warning(76_801).startswith("WARNING: ")
    run.request = tiny_run("gpt", tmp_path, **every | {"trainer__validate_every_steps": 0})
    assert warning(10**9) == ""  # only at the start and the end
    run.request = tiny_run("gpt", tmp_path, **every, trainer__num_validation_samples="auto")
    assert describe_scored(run, 76_800) == (
        "validation by trainer.num_validation_samples=auto, not of all sequences: 76,800 sequences take 5.0% of the "
        "time of the 1,000 training steps between validations\n"
    )
    run.num_validation_samples = None  # the corpus has no more
    assert describe_scored(run, 17) == (
        "validation by trainer.num_validation_samples=auto, of all sequences: 17 sequences take 0.0% of the time of "
        "the 1,000 training steps between validations\n"
    )


@pytest.mark.parametrize(
    "tp_size, compiles, line",
    [
        (2, True, "options: batch halves\n"),
        (2, False, "options: batch halves (hides nothing: layers are not compiled)\n"),
        (1, True, "options: batch halves (hides nothing: tp_size is 1)\n"),
    ],
)
def test_the_first_lines_say_whether_halves_hide_anything(tp_size: int, compiles: bool, line: str, tmp_path) -> None:
    run = tiny_run("gpt", tmp_path)
    layout = Layout(tp_size=tp_size, batch_halves=True)
    assert describe_options(run, run.model.resolve(100), layout, compiles) == line


@pytest.mark.parametrize("warmup_steps, announced", [(1, False), (2, True)])
def test_a_warm_up_as_long_as_the_run_is_announced(tmp_path, capfd, warmup_steps: int, announced: bool) -> None:
    assert train_here(tiny_run("gpt", tmp_path, trainer__max_steps=2, schedule__warmup_steps=warmup_steps)) == 0
    note = f"note: schedule.warmup_steps ({warmup_steps}) is not below trainer.max_steps (2), so the learning rate"
    assert (note in capfd.readouterr().out) == announced


def test_a_run_of_one_process_opens_no_port(tmp_path, monkeypatch) -> None:
    """Another process could take a port between its choice and its use."""

    def refuse(*args, **kwargs) -> None:
        raise AssertionError("a store that listens on a port")

    # The module; torch.distributed.rendezvous is a function.
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "TCPStore", refuse)
    assert train_here(tiny_run("gpt", tmp_path)) == 0


def test_every_damaged_metrics_file_of_a_resumed_run_is_kept(tmp_path, capsys) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "tokenizer.json").write_text("{}")
    corpus = SimpleNamespace(folder=tmp_path / "corpus")
    run = SimpleNamespace(files={}, corpus=corpus, start=SimpleNamespace(step=3), describe=dict)
    texts = ["", "step,train/loss", 'step,train/loss\n1,"0.5\n' + "2,0.5\n" * 30_000]  # torn; with a quote too many
    for text, number in zip(texts, ("", "2", "3"), strict=True):
        name = f"metrics.csv.damaged{number}"
        (tmp_path / METRICS).write_text(text)
        prepare_folder(run, tmp_path, MetricsFile(tmp_path / METRICS))
        assert f"metrics.csv cannot be read; kept as {name}, a new one begins" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == text


def test_a_run_that_goes_on_has_no_record_until_it_ends(tmp_path, monkeypatch) -> None:
    """The record of its first part would say that it has ended, and the command that continues it was not printed."""
    run = tiny_run("gpt", tmp_path, trainer__max_steps=4, resume__path="auto")
    stopped = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, stop_after_steps=2))
    assert train_here(stopped) == 0 and (tmp_path / "record.json").is_file()
    with monkeypatch.context() as patched:
        patched.setattr(Interruption, "install", lambda self: setattr(self, "received", signal.SIGTERM))
        assert train_here(run) == INTERRUPTED
    assert not (tmp_path / "record.json").exists()
    assert next_command.after_training({"run_dir": str(tmp_path)}).startswith("continue: ")
    assert train_here(run) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["steps"] == [3, 4]
    paths = list_checkpoints(tmp_path / "checkpoints")
    saved = [Checkpoint.open(path).metadata.state["train_time_s"] for path in paths]
    times = [*saved, record["metrics"]["train_time"]["value"]]  # after steps 3 and 4 (two are kept), and at the end
    assert all(before < after for before, after in itertools.pairwise(times)), "not of the whole run"


def test_a_clock_that_goes_back_shortens_no_training(tmp_path, monkeypatch) -> None:
    """As NTP sets a host's clock."""
    monkeypatch.setattr(time, "time", itertools.count(2e9, -3600).__next__)
    assert train_here(tiny_run("gpt", tmp_path, trainer__max_steps=2)) == 0
    assert json.loads((tmp_path / "record.json").read_text())["metrics"]["train_time"]["value"] > 0


def _hide_record(rank: int) -> None:
    """On rank 1, as an NFS client that has not looked again."""
    is_file = Path.is_file
    if rank == 1:
        Path.is_file = lambda path: path.name != "record.json" and is_file(path)


def test_rank_0_decides_whether_the_run_has_ended(tmp_path) -> None:
    run = tiny_run("gpt", tmp_path, trainer__max_steps=4, resume__path="auto", parallel__dp_size=2, micro_batch_size=2)
    run_jobs([run], 2)
    record = (tmp_path / "record.json").read_bytes()
    shorter = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, stop_after_steps=2))
    run_jobs([run, shorter], 2, fault=_hide_record)
    assert (tmp_path / "record.json").read_bytes() == record


def test_a_run_folder_that_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    def refuse(*_) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "checkpoints")

    run = resolve(tiny_run("gpt", tmp_path))
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(
        ValueError, match=f"`hydra.run.dir` must be a folder that can be used, but {tmp_path} cannot: .* denied"
    ):
        resolve(run.request)
    monkeypatch.setattr(resuming, "find_checkpoint", refuse)
    assert pretrain(run) == USER_ERROR
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'checkpoints'\n"


HOLD = """
import sys, time
from pathlib import Path
from lmscale.runtime.run_lock import RunLock
lock = RunLock()
lock.take(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(100)
"""


def test_a_folder_in_use_is_refused_by_name_until_its_process_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.3)
    (tmp_path / "metrics.csv").touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        owner = f"process {holder.pid} on {os.uname().nodename}"
        expected = f"`hydra.run.dir` must be a folder of one job, but {tmp_path} is in use by another job ({owner})"
        with pytest.raises(ValueError) as refusal:
            check_not_in_use(tmp_path)
        assert str(refusal.value).startswith(expected + "; wait for it, or")
        with pytest.raises(ValueError) as refusal:
            RunLock().take(tmp_path)
        assert str(refusal.value).startswith(expected + "; wait for it, or")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    check_not_in_use(tmp_path)
    lock = RunLock()
    lock.take(tmp_path)
    lock.release()
    assert (tmp_path / "metrics.csv").exists()


def test_a_requeued_job_waits_for_the_lock_of_a_crashed_host(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.0)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="is in use"):
            RunLock().take(tmp_path)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        threading.Timer(0.5, holder.kill).start()
        RunLock().take(tmp_path)
    finally:
        holder.kill()
        holder.communicate()


def test_a_job_that_waited_while_a_refused_one_removed_the_lock_locks_a_new_one(tmp_path, monkeypatch) -> None:
    held, mine = RunLock(), RunLock()
    held.take(tmp_path / "run")
    monkeypatch.setattr(run_lock, "lock", lambda *args: (held.release(), lock(*args))[1])
    mine.take(tmp_path / "run")
    assert (tmp_path / "run" / run_lock.LOCK).read_text() == f"{os.getpid()} on {os.uname().nodename}"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_folder_with_nothing_but_the_lock_goes_with_it(tmp_path, is_gone: bool) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock()
    lock.take(tmp_path / "run")
    if is_gone:  # removed while the job ran
        shutil.rmtree(tmp_path / "run")
    lock.release()
    assert list(tmp_path.iterdir()) == []
    check_not_in_use(tmp_path / "run")
