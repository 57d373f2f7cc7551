"""One job per run folder: two would delete each other's unfinished checkpoints and mix their metrics."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...launcher import was_requeued
from ...shared_files import lock

LOCK = ".lock"
_PATIENCE_S = 10.0  # ranks of a job whose launcher was killed end within a second or two
_LEASE_S = 120.0  # an NFS server keeps the lock of a crashed host until its lease ends, after 90 s by default


class RunLock:
    """Locks a run folder while rank 0 of this job lives; the kernel releases it however the process ends."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> str | None:
        """Lock the folder; returns None, or why that fails. Waits some seconds for a job that is just ending."""
        try:
            file = open(folder / LOCK, "a+", encoding="utf-8")
        except OSError as error:
            return f"the run folder {folder} cannot be used: {error}"
        if not lock(file, _patience_s()):
            return _in_use(folder, file)
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        self._file = file
        return None

    def release(self) -> None:
        """Release the lock; a folder without anything else, as a refused run leaves it, is removed."""
        if self._file is None:
            return
        path = Path(self._file.name)
        with suppress(OSError):  # the folder is gone, or something has just appeared in it
            if [entry.name for entry in path.parent.iterdir()] == [LOCK]:
                path.unlink()
                if path.parent != Path.cwd():
                    path.parent.rmdir()
        self._file.close()
        self._file = None


def check_not_in_use(folder: Path) -> None:
    """Refuse a run folder whose job is running, before anything is read or started.

    Raises:
        ValueError: another process holds its lock; names it.
    """
    if not (folder / LOCK).is_file() or not os.access(folder / LOCK, os.R_OK | os.W_OK):
        return
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        if not lock(file, _patience_s(), shared=True):
            raise ValueError(_in_use(folder, file))


def _patience_s() -> float:
    """How long to wait for the lock; a job that Slurm has requeued waits for a lease."""
    return _LEASE_S if was_requeued() else _PATIENCE_S


def _in_use(folder: Path, file: IO[str]) -> str:
    file.seek(0)
    return f"the run folder {folder} is in use by another job (process {file.read().strip() or 'unknown'})"
