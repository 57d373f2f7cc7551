"""Read rows of official files and of Hugging Face data sets, each with its location for messages."""

import gzip
import hashlib
import json
import os
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config.finetune import FROM_HUB, FinetuneConfig, TaskConfig
from ..data.sources import load_dataset
from ..results import check_no_record
from ..runtime.world import world_from_outside

Rows = Iterator[tuple[str, dict[str, Any]]]


def is_on_hub(place: str) -> bool:
    """Return whether a path denotes a split on the hub."""
    return place.startswith(FROM_HUB)


def check_values(values: dict[str, Any]) -> None:
    """Check a configuration in plain values, for the jobs of a sweep: its values, its paths and its run folder.

    Raises:
        ValueError: anything invalid, in one line.
    """
    run = FinetuneConfig.from_dict(values)
    if not is_finished(run):
        check_unused(run)
        check_places(run)


def is_finished(run: FinetuneConfig) -> bool:
    """Whether the run folder has the record of this very configuration, and the checkpoint that it was to save.

    The content of its data files and of its checkpoint is not compared. A job whose ranks others have started does not
    count as finished, because they might not all see the folder.
    """
    if world_from_outside() is not None:
        return False
    folder, saves = Path(run.run_dir), run.trainer.save and run.trainer.num_epochs > 0
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        is_same = record["config"]["digest"] == run.digest()
    except (OSError, ValueError, LookupError, TypeError):  # none, damaged, or of an earlier version
        return False
    return is_same and (not saves or any(folder.glob("checkpoints/step_*.ckpt")))


def check_unused(run: FinetuneConfig) -> None:
    """Check that the run folder has neither a record nor a checkpoint: `ckpt=RUN` takes the latest one, which could be
    an earlier run's.

    Raises:
        ValueError: it has one.
    """
    check_no_record(run.run_dir)
    left = sorted(Path(run.run_dir).glob("checkpoints/step_*.ckpt"))
    if left:
        raise ValueError(
            f"`hydra.run.dir` must be a folder without the checkpoints of another run, but {run.run_dir} has "
            f"{left[-1].name}"
        )


def check_places(run: FinetuneConfig) -> None:
    """Check that the checkpoint and the data of a finetuning exist, without torch.

    Raises:
        ValueError: one does not exist; the message names the key.
    """
    places = {"task.train": run.task.train} if run.trainer.num_epochs else {}
    for name, place in run.task.scored_sets().items():
        places[f"task.{'validation' if name in run.task.validation else 'test'}.{name}"] = place
    for key, place in places.items():
        if not is_on_hub(place) and not os.path.exists(place):
            raise ValueError(f"`{key}` must be a file or folder, or hub:<split>, but {place} does not exist")
    if not os.path.exists(run.ckpt):
        raise ValueError(f"`ckpt` must be a checkpoint or a run folder, but {run.ckpt} does not exist")


def read_text(path: Path) -> str:
    """Read a text file without byte-order mark, decompressed if its name ends in .gz.

    Raises:
        ValueError: it cannot be read or is not UTF-8.
    """
    try:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} must be UTF-8, but line {line} has the byte {data[error.start]:#04x}; iconv -f ENCODING -t UTF-8 "
            "FILE > NEW_FILE converts another encoding, such as CP1252 or UTF-16"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be readable as UTF-8 text, but fails with {error}") from None


def tsv_rows(path: Path) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """Read a tab-separated file without quoting, as GLUE's: the header, and (location, cells) of each further line.

    Raises:
        ValueError: as `read_text`; or the file is empty, has other line ends, or two columns of one name.
    """
    lines = _lines(path)
    if not lines or not lines[0]:
        raise ValueError(f"{path} must begin with a line of column names, but {'line 1 ' * bool(lines)}is empty")
    if "\r" in lines[0]:
        raise ValueError(f"{path} must have lines that end in LF or CR LF, but line 1 has a lone CR")
    header = lines[0].split("\t")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path} must have columns of different names, but has {twice!r} twice")
    return header, ((f"line {n}", line.split("\t")) for n, line in enumerate(lines[1:], start=2))


def _lines(path: Path) -> list[str]:
    """Split a file at LF and CR LF only, because a text may contain Unicode's other line ends; only at its end are
    blank lines no rows."""
    text = read_text(path).rstrip("\r\n")
    return [line.removesuffix("\r") for line in text.split("\n")] if text else []


def check_columns(source: str, header: list[str], needed: tuple[str, ...]) -> None:
    """Check that a table has the needed columns.

    Raises:
        ValueError: columns are missing; the message names all of them, and what is there.
    """
    missing = [name for name in needed if name not in header]
    if missing:
        raise ValueError(
            f"{source} must have the columns {', '.join(needed)}, but lacks {', '.join(missing)}{_other_form(header)}"
        )


def _other_form(header: list[str]) -> str:
    """Say which other form a table without tabs seems to have, or else which columns it has."""
    if len(header) != 1:
        return f"; it has {textwrap.shorten(', '.join(header), 120) or 'none'}"
    if header[0].lstrip().startswith(("[", "{")):
        return ": it is JSON, of which FILE.jsonl with one object per line is read"
    return ": it is separated by commas, not by tabs" if "," in header[0] else ""


def json_file(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: as `read_text`; or it is not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, but fails with {error}") from None


def jsonl_rows(path: Path) -> Rows:
    """Yield (location, object) of each line.

    Raises:
        ValueError: as `read_text`; or a line is not a JSON object.
    """
    for number, line in enumerate(_lines(path), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            found = f"fails with {error}" if line.strip() else "is blank"
            raise ValueError(f"{path} line {number} must be JSON, but {found}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path} line {number} must be a JSON object, but is {line[:40]!r}")
        yield f"line {number}", value


def hub_rows(
    task: TaskConfig, place: str, needed: tuple[str, ...], label: str = "", classes: Sequence[str] = ()
) -> Rows:
    """Yield (location, row) of a split on the hub or in its cache; `task.hub_name` may also be a local folder.

    Args:
        label: column whose numbers are indices into `classes`.

    Raises:
        ValueError: the split cannot be loaded, lacks columns, or has the classes in a different order.
    """
    table, source = load_hub(task, place), hub_source(task, place)
    check_columns(source, table.column_names, needed)
    names = getattr(table.features.get(label), "names", None) or []
    if names != [*classes] and sorted(names) == sorted(classes):
        raise ValueError(f"{source}: the classes of `{label}` must be {', '.join(classes)}, but are {', '.join(names)}")
    for number, row in enumerate(table):
        yield f"row {number}", row


def load_hub(task: TaskConfig, place: str) -> Any:
    """Load the split of a data set, as `load_dataset`."""
    return load_dataset("task.hub_name", task.hub_name, task.hub_subset, place.removeprefix(FROM_HUB))


def hub_source(task: TaskConfig, place: str) -> str:
    """Return the name of a split on the hub in messages."""
    return "/".join(part for part in (task.hub_name, task.hub_subset, place.removeprefix(FROM_HUB)) if part)


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
