"""Where a task's rows are: a path, or a split of the Hugging Face hub, whose rows are read here."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config.finetune import FROM_HUB, TaskConfig
from ..data.sources import load_dataset
from ..text.tables import check_columns


def is_on_hub(place: str) -> bool:
    """Return whether a path denotes a split on the hub."""
    return place.startswith(FROM_HUB)


def hub_rows(task: TaskConfig, place: str, needed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) of a split on the hub or in its cache; `task.hub_name` may also be a local folder.

    Raises:
        ValueError: the split cannot be loaded, or lacks columns.
    """
    table = load_hub(task, place)
    check_columns(name_of_split(task, place), table.column_names, needed)
    for number, row in enumerate(table):
        yield f"row {number}", row


def load_hub(task: TaskConfig, place: str) -> Any:
    """Load the split of a data set, as `load_dataset`."""
    return load_dataset("task.hub_name", task.hub_name, *_split(task, place))


def name_of_split(task: TaskConfig, place: str) -> str:
    """Name a split in messages."""
    return "/".join(part for part in (task.hub_name, *_split(task, place)) if part)


def _split(task: TaskConfig, place: str) -> tuple[str | None, str]:
    """The subset and the split of `hub:SPLIT`, or of `hub:SUBSET/SPLIT`."""
    subset, _, split = place.removeprefix(FROM_HUB).rpartition("/")
    return subset or task.hub_subset, split


def fingerprint(task: TaskConfig, place: str) -> str:
    """Hash the content of a file, folder or split, so that changed data are encoded again."""
    if is_on_hub(place):
        return load_hub(task, place)._fingerprint
    digest, path = hashlib.sha256(), Path(place)
    # RACE's middle and high name the level; the suffix of a file determines how its bytes become rows.
    digest.update((path.name if path.is_dir() else "".join(path.suffixes[-2:])).encode())
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(repr((file.relative_to(path).as_posix(), file.stat().st_size)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
