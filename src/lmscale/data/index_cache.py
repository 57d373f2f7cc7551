"""Sample indices on disk: built once for each file system, by one process while the others wait, then memory-mapped."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

INDEX_VERSION = 1  # raised when the same facts give another index
# File systems without locks: several processes may then build the same file, and the last one's takes its place.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class StoredIndex:
    """An array on the disk, memory-mapped; to another process it travels as its name.

    Args:
        path: of a file in NumPy's format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = np.load(path, mmap_mode="r")

    def __reduce__(self) -> tuple:
        return StoredIndex, (self.path,)


def cached_index(folder: Path, kind: str, facts: tuple, build: Callable[[IO[bytes]], None]) -> StoredIndex:
    """The array that `build` writes for these facts; built only where no process has done so before.

    The kernel gives a builder's lock to the next one however the builder ends, so a killed one blocks nobody; what it
    left is removed by the next.

    Args:
        folder: of all indices; made if missing.
        kind: first part of the file's name.
        facts: everything the index depends on; part of the name as a hash.
        build: writes the array to the open file, in NumPy's format.

    Raises:
        ValueError: the folder cannot be written, or the disk is full.
    """
    digest = hashlib.sha256(repr((INDEX_VERSION, np.__version__, *facts)).encode()).hexdigest()[:32]
    path = folder / f"{kind}_{digest}.npy"
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f".{path.name}.lock", "a+b") as lock:
                _take(lock)
                if not path.is_file():
                    _build(path, build)
        return _open(path)
    except OSError as error:
        reason = f"the sample index {path} cannot be written or read: {error.strerror or error}"
        raise ValueError(f"`data.cache_dir` must be a folder with room, but {reason}") from None


def _open(path: Path) -> StoredIndex:
    try:
        return StoredIndex(path)
    except (ValueError, EOFError):  # numpy's words for a file that ends too early
        raise ValueError(f"{path} is damaged; remove it, and it will be made again") from None


def _take(lock: IO[bytes]) -> None:
    """Wait for the lock; closing the file gives it back."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _build(path: Path, build: Callable[[IO[bytes]], None]) -> None:
    for abandoned in path.parent.glob(f".{path.name}.unfinished_*"):
        abandoned.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished_{os.uname().nodename}_{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=1 << 20) as file:
            build(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
