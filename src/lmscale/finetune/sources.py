"""Rows of official files and of data sets on the Hugging Face hub, each with its place for messages."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config.finetune import FROM_HUB, TaskConfig

Rows = Iterator[tuple[str, dict[str, Any]]]


def is_on_hub(place: str) -> bool:
    """Whether a place is a split on the hub."""
    return place.startswith(FROM_HUB)


def check_place(place: str, key: str) -> None:
    """Refuse a path that is not there.

    Raises:
        ValueError: naming the key.
    """
    if not is_on_hub(place) and not Path(place).exists():
        raise ValueError(f"`{key}` must be a file or folder, or hub:<split>, but {place} does not exist")


def read_text(path: Path) -> str:
    """Text of a file, unpacked where its name ends in .gz, without a byte order mark.

    Raises:
        ValueError: it cannot be read or is not UTF-8.
    """
    try:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be readable as UTF-8 text, but fails with {error}") from None


def tsv_rows(path: Path) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """GLUE's tab-separated files, which quote nothing: the header, and (place, cells) of each line after it.

    Raises:
        ValueError: as `read_text`; an empty file.
    """
    # Only these line ends: a question may hold others of Unicode.
    lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
    header = lines[0].split("\t")
    if header == [""]:
        raise ValueError(f"{path} must begin with a line of column names, but is empty")
    rows = ((f"line {n}", line.split("\t")) for n, line in enumerate(lines[1:], start=2) if line)
    return header, rows


def check_columns(source: str, header: list[str], needed: tuple[str, ...]) -> None:
    """Refuse a table that lacks columns.

    Raises:
        ValueError: naming all that are missing.
    """
    missing = [name for name in needed if name not in header]
    if missing:
        raise ValueError(f"{source} must have the columns {', '.join(needed)}, but lacks {', '.join(missing)}")


def json_file(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        ValueError: as `read_text`; no JSON.
    """
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, but fails with {error}") from None


def jsonl_rows(path: Path) -> Rows:
    """(place, object) of each line that is not empty.

    Raises:
        ValueError: as `read_text`; a line that is no JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} line {number} must be JSON, but fails with {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path} line {number} must be a JSON object, but is {line[:40]!r}")
        yield f"line {number}", value


def hub_rows(task: TaskConfig, place: str, needed: tuple[str, ...]) -> Rows:
    """(place, row) of a split on the hub, or in its cache; `task.hub_name` may also be a local folder of such files.

    Raises:
        ValueError: it cannot be had, or lacks columns.
    """
    table = load_hub(task, place)
    check_columns(hub_source(task, place), table.column_names, needed)
    for number, row in enumerate(table):
        yield f"row {number}", row


def load_hub(task: TaskConfig, place: str) -> Any:
    """The data set's split, an Arrow table on disk.

    Raises:
        ValueError: it cannot be had.
    """
    import datasets  # seconds that local files need not spend

    try:
        return datasets.load_dataset(task.hub_name, task.hub_subset, split=place.removeprefix(FROM_HUB))
    except Exception as error:  # the library and the hub client have many
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`task.hub_name` must be a data set that the hub or its cache has, but {hub_source(task, place)}: {reason}"
        ) from None


def hub_source(task: TaskConfig, place: str) -> str:
    """How messages name a split on the hub."""
    return "/".join(part for part in (task.hub_name, task.hub_subset, place.removeprefix(FROM_HUB)) if part)


def fingerprint(task: TaskConfig, place: str) -> str:
    """Hash of everything that a place holds, so that changed files are encoded again."""
    if is_on_hub(place):
        return load_hub(task, place)._fingerprint
    digest, path = hashlib.sha256(), Path(place)
    digest.update(path.name.encode() if path.is_dir() else b"")  # RACE's middle and high name the level
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(repr((file.relative_to(path).as_posix(), file.stat().st_size)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
