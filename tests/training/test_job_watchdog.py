"""The watchdog ends ranks that hang and names them; it leaves slow and stopped ones alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from entry_points import TINY, environment, slurm_task, start, train
from ranks import free_ports
from running_jobs import LONG_RUN, end, linux_only, ranks_of, rows_on_disk, wait_until

from lmscale.parallel.shared_memory import RankGoneError
from lmscale.runtime import watchdog as watchdog_module
from lmscale.runtime.exit_codes import STALLED, USER_ERROR
from lmscale.runtime.lost_rank import LostRank, end_if_lost
from lmscale.runtime.watchdog import Watchdog


def run_code(folder: Path, code: str) -> subprocess.CompletedProcess:
    (folder / "script.py").write_text(code)
    return warm.run([str(folder / "script.py")], folder, environment(), timeout=50)


def test_the_watchdog_ends_a_hung_rank_and_names_its_phase(tmp_path) -> None:
    code = (
        "import time; from lmscale.runtime.watchdog import Watchdog; w = Watchdog(3, 0.5); w.start();"
        "w.mark('step 17, backward pass'); time.sleep(60)"
    )
    begin = time.monotonic()
    done = run_code(tmp_path, code)
    assert done.returncode == STALLED and time.monotonic() - begin < 40
    assert done.stderr.startswith("error: rank 3 has not moved for ") and "in step 17, backward pass" in done.stderr


def test_the_line_of_a_rank_does_not_mix_with_those_of_others(monkeypatch) -> None:
    """With PYTHONUNBUFFERED=1 every write reaches the terminal or log that all ranks share at once."""
    writes = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    with pytest.raises(LostRank):
        end_if_lost(RankGoneError("gone", 1), rank=0, tp_size=2, where="step 3", folder=None)
    assert [text[-1] for text in writes if text] == ["\n"]


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_partner_never_starts_says_so_before_the_watchdog_ends_it(tmp_path, rank: int) -> None:
    (port,) = map(str, free_ports())
    short = ("parallel.tp_size=2", "parallel.timeout_minutes=0.1", f"hydra.run.dir={tmp_path}")
    done = train(*TINY, *short, **slurm_task(rank, port))
    expected = "all 2 ranks must start within 0:00:05.4" if rank == 0 else f"rank 0 must listen at 127.0.0.1:{port} "
    assert done.returncode == USER_ERROR and done.stderr.startswith(f"error: {expected}"), done.stderr


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
    watchdog.pause()  # a user types
    for _ in range(10):
        time.sleep(0.15)
        now += 0.45
    assert ended == []
    watchdog.mark("step 19")
    while not ended:
        now += 0.3  # in steps, as a leap of more than half the limit means that the process was stopped
        time.sleep(0.15)
    watchdog.stop()
    assert ended[0][0] == "step 19" and ended[0][1] > 1.0


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as Ctrl-Z does")
def test_a_process_that_was_stopped_goes_on(tmp_path) -> None:
    """Its child process stops it."""
    code = (
        "import os, signal, time, warnings; read, write = os.pipe()\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # from Python 3.12 of a fork beside torch's threads
        "from lmscale.runtime.watchdog import Watchdog\n"
        "if os.fork() == 0:\n"
        "    os.read(read, 1); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(3)\n"
        "    os.kill(os.getppid(), signal.SIGCONT); os._exit(0)\n"
        "begin = time.monotonic(); w = Watchdog(0, 2.0); w.start(); os.write(write, b'x')\n"
        "for _ in range(100): time.sleep(0.01)\n"
        "print(time.monotonic() - begin > 3)"
    )
    done = run_code(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


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
