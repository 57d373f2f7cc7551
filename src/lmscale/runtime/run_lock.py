"""One job per run folder: two would delete each other's unfinished checkpoints and mix their metrics."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..shared_files import lock
from .world import was_requeued

LOCK, RUN_DIR = ".lock", "hydra.run.dir"
_PATIENCE_S = 10.0  # ranks of a job whose launcher was killed end within a second or two
_LEASE_S = 120.0  # an NFS server keeps the lock of a crashed host until its lease ends, after 90 s by default


class RunLock:
    """Locks a folder while rank 0 of this job lives; the kernel releases it however the process ends.

    Args:
        key: that names the folder, for messages.
    """

    def __init__(self, key: str = RUN_DIR) -> None:
        self._key = key
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> None:
        """Make the folder and lock it; waits some seconds for a job that is just ending.

        Raises:
            ValueError: it cannot be used, or another process holds its lock.
        """
        with run_folder_errors(folder, self._key):
            while True:
                folder.mkdir(parents=True, exist_ok=True)
                file = open(folder / LOCK, "a+", encoding="utf-8")
                _lock_or_refuse(folder, file, self._key)
                if os.fstat(file.fileno()).st_nlink:
                    break
                file.close()  # `release` of the job that had it has removed it, so another could lock a new one
            file.truncate(0)
            file.write(f"{os.getpid()} on {os.uname().nodename}")
            file.flush()
        self._file = file

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
        _lock_or_refuse(folder, file, RUN_DIR, shared=True)


@contextmanager
def run_folder_errors(folder: Path, key: str = RUN_DIR) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the folder and its key."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"`{key}` must be a folder that can be used, but {folder} cannot: {error}") from None


def _lock_or_refuse(folder: Path, file: IO[str], key: str, shared: bool = False) -> None:
    patience_s = _LEASE_S if was_requeued() else _PATIENCE_S
    if not lock(file, patience_s, shared):
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise ValueError(
            f"`{key}` must be a folder of one job, but {folder} is in use by another job (process {owner}); wait for "
            "it, or choose another"
        )
