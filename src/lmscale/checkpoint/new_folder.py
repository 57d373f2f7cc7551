"""A folder that appears under its name only when everything in it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError
from .metadata import METADATA


def check_new_folder(target: str | Path, num_bytes: int) -> None:
    """Refuse a target that exists, or a disk without room for it; nothing is written.

    Args:
        num_bytes: that are going to be written.

    Raises:
        CheckpointError: see above.
    """
    target = Path(target).absolute()
    if os.path.lexists(target):  # a link that leads nowhere, too
        raise CheckpointError(f"`target` must not exist yet, but {target} does")
    inside = next((folder for folder in target.parents if (folder / METADATA).is_file()), None)
    if inside is not None:
        raise CheckpointError(f"`target` must not lie in a checkpoint, but {inside} is one")
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise CheckpointError(f"`target` must lie in a folder, but {parent} is a file")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise CheckpointError(f"`target` needs {num_bytes / 1e9:.2f} GB, but {parent} has {free / 1e9:.2f} GB free")


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """A working folder beside `target`; it becomes `target` at the end, and on any error nothing is left."""
    target = Path(target).absolute()
    working = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    working.mkdir(parents=True)
    try:
        yield working
        for path in [*working.rglob("*"), working]:
            _sync(path)
        os.rename(working, target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
