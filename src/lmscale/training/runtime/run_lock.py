"""One job per run folder: two would delete each other's unfinished checkpoints and mix their metrics."""

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO

_PATIENCE_S = 10.0  # ranks of a job whose launcher was killed end within a second or two
# The file system has no locks: the run continues without one.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class RunLock:
    """Locks a run folder while rank 0 of this job lives; the kernel releases it however the process ends."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> str | None:
        """Lock the folder; returns None, or why that fails. Waits some seconds for a job that is just ending."""
        try:
            file = open(folder / ".lock", "a+", encoding="utf-8")
        except OSError as error:
            return f"the run folder {folder} cannot be used: {error}"
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                if time.monotonic() > deadline:
                    file.seek(0)
                    owner = file.read().strip() or "unknown"
                    file.close()
                    return f"the run folder {folder} is in use by another job (process {owner})"
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        self._file = file
        return None

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
