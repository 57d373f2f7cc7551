"""Fault injection for whole jobs: ranks that hang or die, signals, a second job in the same folder."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from entry_points import TINY, environment, slurm_task, start, train
from ranks import free_ports
from runs import assert_same_run

from lmscale.checkpoint import list_checkpoints, read_metadata
from lmscale.parallel.shared_memory import RankGoneError
from lmscale.training.runtime import watchdog as watchdog_module
from lmscale.training.runtime.exit_codes import FAILED, INTERRUPTED, STALLED, USER_ERROR
from lmscale.training.runtime.lost_rank import what_failed, who_is_gone
from lmscale.training.runtime.run import _end_process_group
from lmscale.training.runtime.watchdog import Watchdog

LONG_RUN = tuple(o for o in TINY if "max_steps" not in o) + ("trainer.max_steps=100000",)


def test_the_watchdog_ends_a_hung_rank_and_names_its_phase() -> None:
    code = (
        "import time; from lmscale.training.runtime.watchdog import Watchdog; w = Watchdog(3, 0.5); w.start();"
        "w.mark('step 17, backward pass'); time.sleep(60)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == STALLED and time.monotonic() - begin < 40
    assert done.stderr.startswith("error: rank 3 has not moved for ") and "in step 17, backward pass" in done.stderr


@pytest.mark.slow
def test_the_watchdog_ends_a_rank_that_hangs_as_it_leaves_the_process_group(tmp_path) -> None:
    code = (
        "import runpy, sys, time; import torch.distributed as dist;"
        "dist.destroy_process_group = lambda: time.sleep(60);"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    short = ("parallel.timeout_minutes=0.1", f"hydra.run.dir={tmp_path}")
    done = train(*TINY, *short, launcher=("-c", code))
    assert done.returncode == STALLED and "in the end of the process group" in done.stderr


@pytest.mark.slow
def test_the_ranks_meet_where_the_name_of_the_host_does_not_resolve(tmp_path) -> None:
    code = (
        "import runpy, socket, sys; socket.getfqdn = lambda name='': 'no-such-host.invalid';"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    overrides = ("parallel.tp_size=2", "parallel.timeout_minutes=0.5", f"hydra.run.dir={tmp_path}")
    done = train(*TINY, *overrides, launcher=("-c", code))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("failed", "backend", "called"), [(True, "nccl", "abort"), (False, "nccl", "destroy"), (True, "gloo", "destroy")]
)
def test_after_a_failure_nccl_is_aborted(monkeypatch, failed: bool, backend: str, called: str) -> None:
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    _end_process_group(failed)
    assert calls == [called]


def test_progress_reports_keep_the_watchdog_from_firing(monkeypatch) -> None:
    """By a clock of its own: nine seconds pass, at most 0.45 without a report."""
    now, ended = 0.0, []
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now))
    watchdog = Watchdog(0, 1.0)
    monkeypatch.setattr(watchdog, "_end", lambda *where: ended.append(where))
    watchdog.start()
    for number in range(20):
        time.sleep(0.15)  # the watchdog looks every 0.1 s
        now += 0.45
        watchdog.mark(f"step {number}")
    assert ended == []
    while not ended:
        now += 0.3  # in steps, as a leap of more than half the limit means that the process was stopped
        time.sleep(0.15)
    watchdog.stop()
    assert ended[0][0] == "step 19" and ended[0][1] > 1.0


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as Ctrl-Z does")
def test_a_process_that_was_stopped_goes_on() -> None:
    code = (
        "import time; from lmscale.training.runtime.watchdog import Watchdog; w = Watchdog(0, 2.0); w.start();"
        "print('ready', flush=True); [time.sleep(0.01) for _ in range(100)]"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=50) == ("", "") and process.returncode == 0


def ranks_of(process: subprocess.Popen) -> list[int]:
    listing = subprocess.run(
        ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(process.pid)], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in listing.stdout.splitlines() if "spawn_main" in line]


def wait_until(condition, process: subprocess.Popen, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def rows_on_disk(run_dir: Path) -> int:
    path = run_dir / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.is_file() else 0


def end(process: subprocess.Popen) -> None:
    """End the process that this test started, with its ranks."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# Between steps, and without shared memory, the ranks talk through gloo, which knows addresses only.
LINE_OF_RANK_0 = (
    r"error: rank 0: (rank 1 of its tensor group|a rank that it communicates with) is gone( \([CB][^()\n]{10,60}\))?; "
    r"it was in [a-z0-9 ,-]+, and ends with exit code 1\n"
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table with ps")


@linux_only
@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_within_the_time_limit(tmp_path) -> None:
    overrides = ("parallel.tp_size=2", "parallel.timeout_minutes=0.25", f"hydra.run.dir={tmp_path}")
    process = start(*LONG_RUN, *overrides)
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 3, process)
        stuck = ranks_of(process)[1]
        os.kill(stuck, signal.SIGSTOP)
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=120)
        assert time.monotonic() - begin < 75  # the agent gives a stopped rank 30 s to receive its SIGTERM
    finally:
        end(process)
    assert process.returncode == STALLED, stderr
    waiting, summary = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert waiting.startswith("error: rank 0 has not moved for ") and ", a collective" not in waiting
    assert "in step " in waiting or "in data for step " in waiting  # wherever the stop met the other rank
    assert waiting.endswith(f"; stacks: {tmp_path}/stacks_rank_0.txt") and "Thread 0x" not in stderr
    assert "/training/pretrain.py" in (tmp_path / "stacks_rank_0.txt").read_text()  # the stack of the main thread
    assert summary == f"error: no report from rank 1, which is stuck or gone (exit code {STALLED})"


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp_size=2",),
        ("parallel.tp_size=2", "parallel.shared_memory=false"),
        ("parallel.tp_size=1", "parallel.dp_size=2"),
    ],
)
def test_a_rank_of_srun_whose_peer_is_killed_prints_one_line(tmp_path, layout) -> None:
    port = str(free_ports()[0])
    ranks = [start(*LONG_RUN, *layout, f"hydra.run.dir={tmp_path}", **slurm_task(rank, port)) for rank in range(2)]
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 2, ranks[0])
        ranks[1].kill()
        _, stderr = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            end(process)
    assert ranks[0].returncode == FAILED, stderr
    assert re.fullmatch(LINE_OF_RANK_0, stderr), stderr


@linux_only
@pytest.mark.slow
def test_the_launcher_blames_the_killed_rank(tmp_path) -> None:
    process = start(*LONG_RUN, "parallel.tp_size=2", f"hydra.run.dir={tmp_path}")
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 2, process)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == FAILED
    of_rank, summary = stderr.splitlines()
    assert re.fullmatch(LINE_OF_RANK_0, of_rank + "\n"), stderr
    # Either rank may be the first that the launcher sees ended.
    assert summary.startswith(("error: rank 1 failed (exit code -9): Signal 9", "error: no report from rank 1, "))


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled cuda error (run with NCCL_DEBUG=INFO for details)
ncclUnhandledCudaError: Call to CUDA function failed.
Exception raised from checkForNCCLErrors at NCCLUtils.cpp:7 (most recent call first):
frame #0: c10::Error::Error"""
NCCL_LINE = (
    "NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled cuda error (run with NCCL_DEBUG=INFO for details) "
    "ncclUnhandledCudaError: Call to CUDA function failed."
)


def test_errors_of_collectives_are_told_in_one_line_and_from_others() -> None:
    assert what_failed(dist.DistBackendError(NCCL)) == what_failed(RuntimeError(NCCL)) == NCCL_LINE
    assert what_failed(dist.DistNetworkError("The client socket has timed out")) == "The client socket has timed out"
    assert what_failed(dist.DistBackendError("NCCL aborted")) == "NCCL aborted; NCCL_DEBUG=INFO shows more"
    assert what_failed(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    gloo = RuntimeError("Gloo connectFullMesh failed: [pair.cc:144] Connection closed by peer [127.0.1.1]:5011\nmore")
    assert who_is_gone(gloo, range(2)) is None
    assert what_failed(gloo).startswith("the hosts cannot reach each other over gloo") and "\n" not in what_failed(gloo)


def test_a_failed_collective_ends_a_run_with_one_line_and_keeps_the_traceback_in_its_folder(tmp_path) -> None:
    code = (
        "import runpy, sys; import torch.distributed as dist; from lmscale.training.module import PretrainModule\n"
        f"def fail(*_): raise dist.DistBackendError({NCCL!r})\n"
        "PretrainModule.training_step = fail\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = train(*TINY, f"hydra.run.dir={tmp_path}", launcher=("-c", code))
    path = tmp_path / "traceback_rank_0.txt"
    where = "step 1, forward pass of micro-batch 1"
    line = f"error: rank 0: communication failed in {where}: {NCCL_LINE}; traceback: {path}\n"
    assert (done.returncode, done.stderr) == (FAILED, line)
    assert "in fail" in path.read_text() and "frame #0" in path.read_text()


def test_a_rank_that_starts_after_ctrl_c_ends_without_a_step() -> None:
    code = "from lmscale.training.runtime.interruption import Interruption; Interruption().install()"
    for name, status in (("SIGINT", 130), ("SIGTERM", 0)):  # after SIGTERM it saves its first step
        assert (
            subprocess.run([sys.executable, "-c", code], env=environment(LMSCALE_INTERRUPTED=name)).returncode == status
        )


def test_a_rank_that_ends_before_it_reads_a_large_job_does_not_block_the_launcher(tmp_path) -> None:
    """It does at Ctrl-C."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "if __name__ == '__mp_main__': os._exit(3)\n"
        "from lmscale.training.runtime.launch import launch\n"
        "launch(len, bytes(10**6), 2)\n"
    )
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == FAILED and re.match(r"error: rank [01] failed \(exit code 3\)", done.stderr), done.stderr


def test_errors_of_lost_connections_are_told_from_others() -> None:
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3456."
    assert who_is_gone(RuntimeError(closed), range(2, 4)) == (
        "a rank that it communicates with is gone (Connection closed by peer [127.0.0.1]:3456)"
    )
    assert who_is_gone(dist.DistNetworkError("failed to recv, got 0 bytes"), range(2)) is not None
    assert who_is_gone(RankGoneError("", 1), range(2, 4)) == "rank 3 of its tensor group is gone"
    assert who_is_gone(dist.DistNetworkError("The client socket has timed out"), range(2)) is None
    assert who_is_gone(RuntimeError("Broken pipe"), range(2)) is None


@linux_only
@pytest.mark.parametrize(
    ("number", "tp_size"),
    [
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_scheduler_signal_saves_at_the_next_step_and_the_resumed_run_is_bitwise_equal(
    tmp_path, number, tp_size
) -> None:
    settings = (*LONG_RUN, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path / 'run'}", "resume=auto")
    process = start(*settings)
    try:
        wait_until(lambda: rows_on_disk(tmp_path / "run") > 2, process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == INTERRUPTED, stderr
    (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    step = read_metadata(path).step
    assert step == rows_on_disk(tmp_path / "run") and f"after step {step}, saved in" in stdout
    assert train(*settings, f"trainer.stop_after_steps={step + 2}").returncode == 0
    other = (*LONG_RUN, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path / 'whole'}")
    assert train(*other, f"trainer.stop_after_steps={step + 2}").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@linux_only
@pytest.mark.parametrize(
    ("number", "tp_size"),
    [
        (signal.SIGUSR1, 1),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_torch_is_imported_ends_with_the_code_that_requeues_the_job(tmp_path, number, tp_size) -> None:
    process = start(*LONG_RUN, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path}")

    def loads_torch() -> bool:
        return any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids())

    def pids() -> list[int]:  # with several ranks, those: the process that starts them has its handlers by then
        return [process.pid] if tp_size == 1 else ranks_of(process)

    try:
        wait_until(loads_torch, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == INTERRUPTED, stderr
    assert stderr == f"stopped by {number.name} outside training: nothing to save\n"
    assert not list_checkpoints(tmp_path / "checkpoints")


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("at", ["training_step", "validation_step"])
def test_a_signal_in_a_validation_saves_before_its_end(tmp_path, at: str, killed: bool) -> None:
    """The signal comes to one of two data ranks with the last training micro-batch, or in a long validation."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Patch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'lmscale.training.pretrain' and self in sys.meta_path:\n"
        "            sys.meta_path.remove(self)\n"
        "            from lmscale.training.step.module import PretrainModule as module\n"
        "            train, validate = module.training_step, module.validation_step\n"
        "            def send(self, where):\n"
        f"                if where == {at!r} and self.parallel.dp_rank == 1:\n"
        "                    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "            def training_step(self, batch, batch_idx):\n"
        "                send(self, 'training_step' if self.completed_steps == 1 else '')\n"
        "                return train(self, batch, batch_idx)\n"
        "            def validation_step(self, batch, batch_idx):\n"
        "                send(self, 'validation_step' if (self.completed_steps, batch_idx) == (2, 3) else '')\n"
        f"                if (self.completed_steps, batch_idx, {killed}) == (2, 11, True):\n"
        "                    os._exit(9)\n"
        "                return validate(self, batch, batch_idx)\n"
        "            module.training_step, module.validation_step = training_step, validation_step\n"
        "sys.meta_path.insert(0, Patch())\n"
    )
    run = (
        "parallel.dp_size=2",
        "micro_batch_size=1",
        "trainer.validate_every_steps=2",
        f"hydra.run.dir={tmp_path}/run",
    )
    done = train(*LONG_RUN, *run, "trainer.num_validation_samples=25", PYTHONPATH=str(tmp_path))
    (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    metadata = read_metadata(path)
    assert metadata.step == 2 and "validation" not in metadata.state, done.stderr
    assert (done.returncode == INTERRUPTED) == (not killed), done.stderr


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_leaves_the_loaders_running_until_the_ranks_have_saved(tmp_path, number) -> None:
    process = start(*LONG_RUN, "data.num_workers=2", f"hydra.run.dir={tmp_path}")
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 2, process)
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == INTERRUPTED, stderr
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1


@linux_only
@pytest.mark.slow
def test_a_killed_rank_restarts_from_the_newest_checkpoint(tmp_path) -> None:
    short = tuple(o for o in TINY if "max_steps" not in o) + ("trainer.max_steps=40", "parallel.tp_size=2")
    short += ("checkpoint.save_every_steps=3",)
    process = start(*short, "max_restarts=2", f"hydra.run.dir={tmp_path / 'run'}")
    try:
        wait_until(lambda: list_checkpoints(tmp_path / "run" / "checkpoints"), process)
        os.kill(ranks_of(process)[0], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=200)
    finally:
        end(process)
    assert process.returncode == 0, stderr
    assert stdout.count("run folder:") == 2 and "resumed from" in stdout
    assert train(*short, f"hydra.run.dir={tmp_path / 'whole'}").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@linux_only
@pytest.mark.slow
def test_a_second_job_in_the_same_run_folder_is_refused_and_the_first_continues(tmp_path) -> None:
    process = start(*LONG_RUN, f"hydra.run.dir={tmp_path}")
    try:
        wait_until(lambda: rows_on_disk(tmp_path) > 2, process)
        second = train(*LONG_RUN, f"hydra.run.dir={tmp_path}", "resume=auto")
        assert second.returncode == USER_ERROR
        assert second.stderr.startswith(
            f"error: the run folder {tmp_path} is in use by another job (process {process.pid} on"
        )
        assert second.stdout == ""  # before anything has started
        fresh = train(*LONG_RUN, f"hydra.run.dir={tmp_path}")
        assert fresh.returncode == USER_ERROR and "is in use by another job" in fresh.stderr
        rows = rows_on_disk(tmp_path)
        wait_until(lambda: rows_on_disk(tmp_path) > rows + 2, process)
    finally:
        end(process)
