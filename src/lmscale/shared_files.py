"""Files that several processes use, or that a crash may cut short: written whole or not at all, locked, or sockets."""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# The file system has no locks; over NFS, none of a folder.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}


def check_sockets(key: str) -> None:
    """Check that Python's helper processes can reach each other: over sockets in the temporary folder.

    The path of a socket has at most 107 bytes, on macOS 103. Loader processes and their rank would wait forever.

    Args:
        key: starts such processes.

    Raises:
        ValueError: a socket named as `multiprocessing` does cannot be made there.
    """
    with tempfile.TemporaryDirectory(prefix="pymp-") as folder, socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(os.path.join(folder, "listener-01234567"))
        except OSError as error:
            raise ValueError(
                f"`TMPDIR` must be a folder for sockets with a short path where `{key}` starts processes, as "
                f"TMPDIR=/tmp is, but is {tempfile.gettempdir()} ({error})"
            ) from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file and sync it to disk; a file that had the name stays until the new one is complete."""
    temporary = path.with_name(f".{path.name}.unfinished")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that gets the name `path` at the end, so that a file of that name is always complete.

    Its folder is made. Processes that write the same file at once have different temporary names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that gets the name `folder` at the end, unless another process was first with equal files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".building_{uuid.uuid4().hex}")
    building.mkdir()  # not by mkdtemp, whose folders no other user may read
    try:
        yield building
        try:
            os.rename(building, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Wait until a file or a directory entry is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: IO | int, patience_s: float = 0.0, shared: bool = False) -> bool:
    """Whether an open file or folder could be locked within `patience_s`; also true where there are no locks.

    Closing it releases the lock; the kernel does so however a process ends.
    """
    deadline, kind = time.monotonic() + patience_s, fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            if not isinstance(error, BlockingIOError):
                raise
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
