"""Which files of a path are read, and which are skipped."""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .formats import READABLE, advice_on, format_of


@dataclass(frozen=True)
class InputFiles:
    """The files of a path that are read.

    Args:
        root: folder that their names are relative to.
        paths: sorted.
        skipped: what a folder holds besides, counted by reason, with an example; empty if nothing.
    """

    root: Path
    paths: list[Path]
    skipped: str = ""


def list_files(path: Path, key: str) -> InputFiles:
    """List the files of a known type at a path: the file itself, or those in a folder and the folders below it.

    Files and folders whose names begin with a dot are skipped: they are copies and databases of editors, of notebooks
    and of git, and macOS's `._` files. Links to folders are not followed.

    Args:
        key: of the path in the configuration, for messages.

    Raises:
        ValueError: there is none, one is a link without target, a pipe or a device (reading would wait for ever), or a
            folder cannot be listed.
    """
    if path.is_file():
        if not format_of(path.name):
            raise ValueError(f"`{key}` must end in {READABLE}, but is {path}; {advice_on(path.name)}")
        return InputFiles(path.parent, [path])
    if not path.is_dir():
        rule = "be a file or a folder, but {} is neither" if path.exists() else "exist, but {} does not"
        raise ValueError(f"`{key}` must {rule.format(path)}")
    found, others = [], defaultdict(list)

    def refuse(error: OSError) -> NoReturn:
        raise ValueError(f"`{key}` must hold folders that can be read, but {error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(path, onerror=refuse):
        for name in folders + files:
            if name.startswith("."):
                others["hidden"].append(Path(folder, name))
        folders[:] = [name for name in folders if not name.startswith(".")]
        others["linked folders"] += [place for name in folders if (place := Path(folder, name)).is_symlink()]
        for name in files:
            if not name.startswith("."):
                (found if format_of(name) else others["of other types"]).append(Path(folder, name))
    counts = [
        f"{len(places)} {reason} (the first is {min(places).relative_to(path)})"
        for reason, places in sorted(others.items())
        if places
    ]
    skipped = f"skipped {', '.join(counts)}" if counts else ""
    if not found:
        advice = f"; {advice_on(min(others['of other types']).name)}" if others["of other types"] else ""
        why = f"{path} has none; {skipped}{advice}".rstrip("; ")
        raise ValueError(f"`{key}` must hold files ending in {READABLE}, but {why}")
    for file in found:
        if not file.is_file():
            what = "a pipe or device" if file.exists() else f"a link to {os.readlink(file)}, which does not exist"
            raise ValueError(f"`{key}` must hold files and links to files, but {file} is {what}")
    return InputFiles(path, sorted(found), skipped)
