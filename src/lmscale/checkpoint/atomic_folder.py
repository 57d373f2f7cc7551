"""Create folders atomically: they get their name only when all of their content is complete and on disk."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..shared_files import lock, sync_to_disk
from .errors import CheckpointError
from .metadata import METADATA


def check_target(target: str | Path, num_bytes: int) -> None:
    """Check that a folder can be created with enough free disk space; nothing is written.

    Args:
        num_bytes: number of bytes to be written.

    Raises:
        CheckpointError: the target exists, is inside a checkpoint, or the disk has too little space.
    """
    target = Path(target).absolute()
    if os.path.lexists(target):  # also true for a dangling link
        raise CheckpointError(f"`target` must not exist yet, but {target} does")
    inside = next((folder for folder in target.parents if (folder / METADATA).is_file()), None)
    if inside is not None:
        raise CheckpointError(f"`target` must not be inside a checkpoint, but {inside} is one")
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise CheckpointError(f"`target` must be inside a folder, but {parent} is a file")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise CheckpointError(f"`target` needs {num_bytes / 1e9:.2f} GB, but {parent} has {free / 1e9:.2f} GB free")


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """Yield a working folder next to `target` that is renamed to it at the end and removed on any error.

    Files of an earlier process that was killed are removed first.

    Raises:
        CheckpointError: another process is creating `target`.
    """
    target = Path(target).absolute()
    working = target.with_name(f".{target.name}.unfinished")
    working.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(working, os.O_RDONLY)
    if not lock(descriptor):
        os.close(descriptor)
        raise CheckpointError(f"`target` must not be in use, but another process is writing {target}")
    try:
        for path in working.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield working
        for path in [*working.rglob("*"), working]:
            sync_to_disk(path)
        os.rename(working, target)
        sync_to_disk(target.parent)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)
