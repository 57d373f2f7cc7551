"""The lock of a run folder: one job at a time, also after kill -9, and nothing left of a refused one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from lmscale.training.runtime import run_lock
from lmscale.training.runtime.run_lock import RunLock, check_not_in_use

HOLD = """
import sys, time
from pathlib import Path
from lmscale.training.runtime.run_lock import RunLock
lock = RunLock()
print(lock.take(Path(sys.argv[1])), flush=True)
time.sleep(100)
"""


def test_a_folder_in_use_is_refused_by_name_until_its_process_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.3)
    (tmp_path / "metrics.csv").touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "None\n"
        expected = f"the run folder {tmp_path} is in use by another job (process {holder.pid} on {os.uname().nodename})"
        with pytest.raises(ValueError) as refusal:
            check_not_in_use(tmp_path)
        assert str(refusal.value) == expected
        assert RunLock().take(tmp_path) == expected
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    check_not_in_use(tmp_path)
    lock = RunLock()
    assert lock.take(tmp_path) is None
    lock.release()
    assert (tmp_path / "metrics.csv").exists()


def test_a_requeued_job_waits_for_the_lock_of_a_crashed_host(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.0)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "None\n"
        assert "is in use" in RunLock().take(tmp_path)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        threading.Timer(0.5, holder.kill).start()
        assert RunLock().take(tmp_path) is None
    finally:
        holder.kill()
        holder.communicate()


def test_a_folder_with_nothing_but_the_lock_goes_with_it(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock()
    assert lock.take(tmp_path / "run") is None
    lock.release()
    assert list(tmp_path.iterdir()) == []
    check_not_in_use(tmp_path / "run")
