"""`make demo` as a process: a signal to it ends its training."""

import os
import signal
import subprocess
import time
from pathlib import Path

import warm

from analysis.demo import demo


def run_demo(started: Path) -> None:
    """The demo in this process, with a stand-in for its first training."""

    def train(*args, **kwargs) -> None:
        subprocess.run(["sh", "-c", f"echo $$ > {started}; exec sleep 60"])

    demo.sys.argv, demo.train = ["demo.py"], train
    demo.main()


def test_sigterm_ends_the_training_too(tmp_path) -> None:
    started = tmp_path / "pid"
    process = warm.context.Process(target=run_demo, args=(started,))
    process.start()
    while not started.is_file() or not started.read_text().strip():
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert not os.path.exists(f"/proc/{int(started.read_text())}")
