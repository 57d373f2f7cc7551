"""Jobs that a test stops, kills or signals while they train."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from entry_points import TINY

LONG_RUN = ("model=gpt_tiny", *(o for o in TINY if "max_steps" not in o), "trainer.max_steps=100000")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the process table with ps")


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
