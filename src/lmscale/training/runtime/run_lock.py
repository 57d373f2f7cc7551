"""One job per run folder: two would delete each other's unfinished checkpoints and mix their metrics."""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...launcher import was_requeued

LOCK = ".lock"
_PATIENCE_S = 10.0  # ranks of a job whose launcher was killed end within a second or two
_LEASE_S = 120.0  # an NFS server keeps the lock of a crashed host until its lease ends, after 90 s by default
# The file system has no locks: the run continues without one.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


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
        if not _lock(file, fcntl.LOCK_EX):
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
        if [entry.name for entry in path.parent.iterdir()] == [LOCK]:
            path.unlink()
            if path.parent != Path.cwd():
                with suppress(OSError):  # something has just appeared in it
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
        if not _lock(file, fcntl.LOCK_SH):
            raise ValueError(_in_use(folder, file))


def _lock(file: IO[str], kind: int) -> bool:
    """Whether the file could be locked within some seconds; a job that Slurm has requeued waits for a lease."""
    deadline = time.monotonic() + (_LEASE_S if was_requeued() else _PATIENCE_S)
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def _in_use(folder: Path, file: IO[str]) -> str:
    file.seek(0)
    return f"the run folder {folder} is in use by another job (process {file.read().strip() or 'unknown'})"
