"""Create a folder atomically: it gets its name only when all of its content is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Yield a working folder next to `target` that is renamed to it at the end and removed on any error."""
    target = Path(target).absolute()
    working = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    working.mkdir(parents=True)
    try:
        yield working
        for path in [*working.rglob("*"), working]:
            sync_to_disk(path)
        os.rename(working, target)
        sync_to_disk(target.parent)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Wait until a file or a directory entry is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
