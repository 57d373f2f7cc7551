"""Sample indices on disk: built once per file system, by one process while the others wait, then memory-mapped."""

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from ..shared_files import lock

INDEX_VERSION = 1  # incremented when the same facts give a different index


class StoredIndex:
    """A memory-mapped array on disk; pickled as its path.

    Args:
        path: a file in NumPy's format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = np.load(path, mmap_mode="r")

    def __reduce__(self) -> tuple:
        return StoredIndex, (self.path,)


def cached_index(folder: Path, kind: str, facts: tuple, build: Callable[[IO[bytes]], None]) -> StoredIndex:
    """Open the array that `build` writes for these facts, and build it if it does not exist.

    The kernel releases the lock of a process that is killed, so it blocks nobody; the next process that builds the same
    index on that host removes its unfinished file.

    Args:
        folder: folder of all indices; created if missing.
        kind: first part of the file name.
        facts: everything the index depends on; hashed into the file name.
        build: writes the array to the open file, in NumPy's format.

    Raises:
        ValueError: the folder cannot be written, the disk is full, or the file is damaged.
    """
    digest = hashlib.sha256(repr((INDEX_VERSION, np.__version__, *facts)).encode()).hexdigest()[:32]
    path = folder / f"{kind}_{digest}.npy"
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f".{path.name}.lock", "a+b") as file:
                # Without locks several processes build it, each under its own name; the last rename wins.
                lock(file, math.inf)
                if not path.is_file():
                    _build(path, build)
        return _open(path)
    except OSError as error:
        reason = f"the sample index {path} cannot be written or read: {error.strerror or error}"
        raise ValueError(f"`data.cache_dir` must be a writable folder with free space, but {reason}") from None


def _open(path: Path) -> StoredIndex:
    try:
        return StoredIndex(path)
    except (ValueError, EOFError):  # numpy's errors for a truncated file
        raise ValueError(f"{path} is damaged; remove it to have it built again") from None


def _build(path: Path, build: Callable[[IO[bytes]], None]) -> None:
    prefix = f".{path.name}.unfinished_{os.uname().nodename}@"  # a host name may have _, but no @
    for unfinished in path.parent.glob(f"{prefix}*"):  # other hosts' builders may be alive: locks do not reach them all
        if not _is_running(int(unfinished.name.removeprefix(prefix))):
            unfinished.unlink(missing_ok=True)
    temporary = path.with_name(f"{prefix}{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=1 << 20) as file:
            build(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if not path.is_file():  # else another process has built it
            raise
    finally:
        temporary.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True
