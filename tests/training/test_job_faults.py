"""Fault injection for whole jobs: ranks that die, collectives that fail, a second job in the folder, random kills."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import warm
from entry_points import REPOSITORY, TINY, environment, slurm_task, start, train
from ranks import free_ports
from running_jobs import LONG_RUN, end, linux_only, ranks_of, rows_on_disk, wait_until
from runs import assert_same_run

from lmscale.checkpoint import list_checkpoints
from lmscale.parallel.shared_memory import RankGoneError
from lmscale.runtime import launch
from lmscale.runtime.exit_codes import FAILED, USER_ERROR
from lmscale.runtime.lost_rank import LostRank, end_if_lost, what_failed, who_is_gone
from lmscale.training.session import _end_process_group
from lmscale.training.strategy import TensorParallelStrategy


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


@pytest.mark.parametrize(("num_ranks", "backend", "calls"), [(2, "nccl", ["abort"]), (2, "gloo", []), (1, "nccl", [])])
def test_an_exception_abandons_what_waits_for_a_lost_rank(
    monkeypatch, num_ranks: int, backend: str, calls: list
) -> None:
    """Lightning then frees the GPU's memory, which waits for the stream."""
    found = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: found.append("abort"))
    monkeypatch.setattr(TensorParallelStrategy, "world_size", num_ranks)
    TensorParallelStrategy().on_exception(RuntimeError("lost"))
    assert found == calls


# Between steps, and without shared memory, the ranks talk through gloo, which knows addresses only.
LINE_OF_RANK_0 = (
    r"error: rank 0: (rank 1 of its tensor group|a rank that it communicates with) is gone( \([CB][^()\n]{10,60}\))?; "
    r"it was in [a-z0-9 ,-]+, and ends with exit code 1\n"
)


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
        ranks = ranks_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == FAILED and len(ranks) == 2
    assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]
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
    (tmp_path / "script.py").write_text(
        "import runpy, sys; import torch.distributed as dist; from lmscale.training.module import PretrainModule\n"
        f"def fail(*_): raise dist.DistBackendError({NCCL!r})\n"
        "PretrainModule.dropout_keys = fail\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [str(REPOSITORY / "src" / "train.py"), *TINY, f"hydra.run.dir={tmp_path}/run"]
    done = warm.run([str(tmp_path / "script.py"), *command], REPOSITORY, environment(), timeout=300)
    path = tmp_path / "run" / "traceback_rank_0.txt"
    where = "step 1, forward pass of micro-batch 1"
    line = f"error: rank 0: communication failed in {where}: {NCCL_LINE}; traceback: {path}\n"
    assert (done.returncode, done.stderr) == (FAILED, line)
    assert "in fail" in path.read_text() and "frame #0" in path.read_text()


def test_a_rank_that_ends_before_it_reads_a_large_job_does_not_block_the_launcher(tmp_path) -> None:
    """It does at Ctrl-C."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "if __name__ == '__mp_main__': os._exit(3)\n"
        "from lmscale.runtime.launch import launch\n"
        "launch(len, bytes(10**6), 2)\n"
    )
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == FAILED and re.match(r"error: rank [01] failed \(exit code 3\)", done.stderr), done.stderr


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_host_without_a_loopback_interface_is_refused(monkeypatch, world_size: int) -> None:
    def connect(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(launch.socket, "socket", lambda *_: nullcontext(SimpleNamespace(connect=connect)))
    with pytest.raises(ValueError, match="loopback interface must be up .* but 127.0.0.1: Network is unreachable"):
        launch.launch(len, [], world_size)


def test_the_errors_of_the_ranks_are_those_of_the_last_start(tmp_path) -> None:
    for attempt, rank, text in ((0, 0, "[0]"), (9, 0, "[9]"), (10, 0, "[10]"), (10, 1, "[torn")):
        file = tmp_path / "job" / f"attempt_{attempt}" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        file.write_text(f'{{"message": {text}}}')
    assert launch._reports(tmp_path) == {0: [10]}


def test_errors_of_lost_connections_are_told_from_others(capsys) -> None:
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3456."
    assert who_is_gone(RuntimeError(closed), range(2, 4)) == (
        "a rank that it communicates with is gone (Connection closed by peer [127.0.0.1]:3456)"
    )
    assert who_is_gone(dist.DistNetworkError("failed to recv, got 0 bytes"), range(2)) is not None
    with pytest.raises(LostRank) as ended:
        end_if_lost(RankGoneError("", 1), 2, 2, "step 5", None)
    assert ended.value.code == FAILED
    assert "error: rank 2: rank 3 of its tensor group is gone; it was in step 5" in capsys.readouterr().err
    assert who_is_gone(dist.DistNetworkError("The client socket has timed out"), range(2)) is None
    assert who_is_gone(RuntimeError("Broken pipe"), range(2)) is None


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_killed_rank_restarts_from_the_newest_checkpoint(tmp_path, tp_size) -> None:
    short = tuple(o for o in TINY if "max_steps" not in o) + ("trainer.max_steps=40", f"parallel.tp_size={tp_size}")
    short += ("checkpoint.save_every_steps=3",)
    process = start(*short, "max_restarts=2", f"hydra.run.dir={tmp_path / 'run'}")
    try:
        wait_until(lambda: list_checkpoints(tmp_path / "run" / "checkpoints"), process)
        os.kill(ranks_of(process)[0], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=200)
    finally:
        end(process)
    assert process.returncode == 0, stderr
    assert stdout.count("run folder:") == 2 and "resumed from" in stdout and "restart 1 of 2 after" in stdout
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
            "error: `hydra.run.dir` must be a folder of one job, "
            f"but {tmp_path} is in use by another job (process {process.pid} on"
        )
        assert second.stdout == ""  # before anything has started
        fresh = train(*LONG_RUN, f"hydra.run.dir={tmp_path}")
        assert fresh.returncode == USER_ERROR and "is in use by another job" in fresh.stderr
        rows = rows_on_disk(tmp_path)
        wait_until(lambda: rows_on_disk(tmp_path) > rows + 2, process)
    finally:
        end(process)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ten_kills_lose_nothing(tmp_path) -> None:
    command = [sys.executable, str(REPOSITORY / "analysis" / "correctness" / "soak.py"), "--kills", "10"]
    command += ["--folder", str(tmp_path / "soak"), "--seed", "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / "soak" / "soak.json").read_text())["metrics"]
    metrics = {name: entry["value"] for name, entry in entries.items()}
    assert sum(value for name, value in metrics.items() if name.startswith("kills/")) == 10
    assert metrics["kills_in_mid_save"] >= 1 and metrics["checkpoints_lost"] == 0
    assert [value for name, value in metrics.items() if name.startswith("differing/")] == [0, 0, 0]
