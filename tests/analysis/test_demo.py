"""`make demo` as a process: a signal to it ends its training, which saves first."""

import os
import signal
import time
from pathlib import Path

import pytest
import warm

from analysis import running
from analysis.demo import demo

STAND_IN = """
import os, signal, sys, time
from pathlib import Path
state = Path(__file__).with_name("state")
def save(number, frame):
    time.sleep(0.5)
    state.write_text("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
state.with_name("pid").write_text(f"{os.getpid()}\\n")
time.sleep(60)
"""


def run_demo(clone: Path) -> None:
    """The demo in this process, with the entry points of another clone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    demo.REPOSITORY = running.ROOT = clone
    demo.sys.argv = ["demo.py"]
    demo.main()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_signal_ends_the_training_too_which_saves_first(tmp_path, number: signal.Signals, code: int) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(STAND_IN)
    process, started = warm.context.Process(target=run_demo, args=(tmp_path,)), tmp_path / "src" / "pid"
    process.start()
    while not started.is_file() or not started.read_text().endswith("\n"):
        assert process.is_alive()
        time.sleep(0.05)
    pid = int(started.read_text())
    if number == signal.SIGINT:  # a terminal sends it to both
        os.kill(pid, number)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code and (tmp_path / "src" / "state").read_text() == "saved"
    assert not os.path.exists(f"/proc/{pid}")
