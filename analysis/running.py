"""Run an entry point from a study's script, and leave no process behind."""

import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_python(script: str | Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """Run a script to its end with the current interpreter. A training saves when it is stopped, so it is waited for.

    SIGTERM is passed on to the script. A terminal sends Ctrl-C to both processes.

    Args:
        script: relative to the clone.
        options: of `subprocess.Popen`.

    Raises:
        CalledProcessError: the script failed.
        SystemExit: 143, after SIGTERM.
    """
    process, received = None, None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        if process is not None:
            process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        process = subprocess.Popen([sys.executable, str(ROOT / script), *arguments], **options)
        if received is not None:  # before there was a process
            process.send_signal(received)
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if received is not None:
        sys.exit(128 + received)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output)
    return subprocess.CompletedProcess(process.args, 0, output)
