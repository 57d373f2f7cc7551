"""Which files are read: the known types by suffix, and those of a path; what is skipped is counted."""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_FORMATS = {".txt": "text", ".md": "text", ".tokens": "text", ".jsonl": "json", ".json": "json"}  # .tokens: WikiText's
_FORMATS |= {".tar": "tar", ".parquet": "parquet"}
_PACKINGS = (".gz", ".zst")
_OTHER_PACKINGS = (".xz", ".bz2", ".zip", ".7z", ".rar")
PACKED = _PACKINGS + _OTHER_PACKINGS
_TABLES = (".csv", ".tsv", ".xls", ".xlsx")
_SUFFIXES = (*_FORMATS, *(f"{name}{end}" for name in _FORMATS if name != ".parquet" for end in _PACKINGS), ".tgz")
READABLE = f"{', '.join(_FORMATS)} (all but .parquet also with {' or '.join(_PACKINGS)})"


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


def format_of(name: str) -> str | None:
    """Return `json`, `text`, `parquet` or `tar` by the suffix of a file's name; None if it is unknown."""
    name = name.lower()
    if not name.endswith(_SUFFIXES):
        return None
    if name.endswith(".tgz"):
        return "tar"
    name = name.removesuffix(packing_of(name))
    return next(kind for suffix, kind in _FORMATS.items() if name.endswith(suffix))


def packing_of(name: str) -> str:
    """Return `.gz` or `.zst` by the suffix of a file's name; empty if it is not packed."""
    name = name.lower()
    return ".gz" if name.endswith(".tgz") else next((end for end in _PACKINGS if name.endswith(end)), "")


def is_text(name: str) -> bool:
    """Return whether a file that is given by name may be read as text: any but those known to be something else."""
    return format_of(name) in (None, "text", "json") and not name.lower().endswith(_TABLES + _OTHER_PACKINGS)


def advice_on(name: str) -> str:
    """Return what can be done with a file of a different type."""
    if name.lower().endswith(_TABLES):
        return "save its text as .jsonl or .parquet (pandas: DataFrame.to_json(FILE, orient='records', lines=True))"
    if name.lower().endswith(_OTHER_PACKINGS):
        return "unpack it, or pack it as .gz or .zst"
    return "if it is plain text, rename it to .txt"


def list_files(path: Path, key: str) -> InputFiles:
    """List the files of a known type at a path: the file itself, or those in a folder and the folders below it.

    Files and folders whose names begin with a dot are skipped: they are copies and databases of editors, of notebooks
    and of git, and macOS's `._` files. Links to folders are not followed.

    Args:
        key: key of the path in the configuration, for messages.

    Raises:
        ValueError: there is none, one is a link without target, a pipe or a device (reading would block), or a
            folder cannot be listed.
    """
    if os.path.isfile(path):  # Path.is_file raises where a folder above cannot be searched; os.walk names it
        if not format_of(path.name):
            raise ValueError(f"`{key}` must end in {READABLE}, but is {path}; {advice_on(path.name)}")
        return InputFiles(path.parent, [path])
    found, others = [], defaultdict(list)

    def refuse(error: OSError) -> NoReturn:
        raise ValueError(f"`{key}` must be a file or a folder that can be read, but {error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(path, onerror=refuse):
        for name in folders + files:
            if name.startswith("."):
                others["hidden"].append(Path(folder, name))
        folders[:] = [name for name in folders if not name.startswith(".")]
        others["linked folders"] += [place for name in folders if (place := Path(folder, name)).is_symlink()]
        for name in files:
            if not name.startswith("."):
                (found if format_of(name) else others["other types"]).append(Path(folder, name))
    counts = [
        f"{reason} {len(places):,} (the first is {min(places).relative_to(path)})"
        for reason, places in sorted(others.items())
        if places
    ]
    skipped = f"skipped: {', '.join(counts)}" if counts else ""
    if not found:
        advice = f"; {advice_on(min(others['other types']).name)}" if others["other types"] else ""
        why = f"{path} has none; {skipped}{advice}".rstrip("; ")
        raise ValueError(f"`{key}` must hold files ending in {READABLE}, but {why}")
    for file in found:
        if not file.is_file():
            what = "a pipe or device" if file.exists() else f"a link to {os.readlink(file)}, which does not exist"
            raise ValueError(f"`{key}` must hold files and links to files, but {file} is {what}")
    return InputFiles(path, sorted(found), skipped)
