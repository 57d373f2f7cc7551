"""Read the committed records.

A study keeps its records in `analysis/<study>/records/`. A record's name is its path below that folder: `demo.json`, or
`study/ID` for the record ID of a file of many records, `study.jsonl`.
"""

import errno
import json
import os
from pathlib import Path

import pandas as pd

from lmscale.config.cluster import Cluster
from lmscale.config.from_dict import build

ANALYSIS = Path(__file__).resolve().parents[1]
# Of `new_record`, for what ran on one thread of a CPU.
ONE_THREAD = {"device": "cpu", "layout": {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}}


def read_records(folder: Path = ANALYSIS) -> dict[str, dict]:
    """Read the records below a folder, by name: the path below `records/`, or below `folder` if there is none.

    Other files are ignored.

    Raises:
        ValueError: a file is not JSON, or two records have the same name.
    """
    paths = sorted(folder.rglob("*.json"))
    names = [path.relative_to(folder).as_posix().rpartition("records/")[2] for path in paths]
    if again := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the names of records must be different, but {', '.join(sorted(again))} occurs twice")
    found = {name: _parse(path.read_bytes(), str(path)) for name, path in zip(names, paths, strict=True)}
    for path in sorted(folder.rglob("*.jsonl")):
        found |= {f"{path.stem}/{name}": record for name, record in read_lines(path).items()}
    return {name: record for name, record in found.items() if isinstance(record, dict) and "record_version" in record}


def _parse(text: str | bytes, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"a record must be JSON, but {where} is not: {error}") from error


def read_lines(path: Path) -> dict[str, dict]:
    """Read the records of a file that holds one per line, by ID; none if there is no file.

    A line `{"shared": ...}` has what the records after it have in common; each of those has its ID as `record` and the
    rest. Other lines are ignored.

    Raises:
        ValueError: a line is not JSON, or an ID occurs twice.
    """
    found, shared = {}, {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        if not isinstance(row := _parse(line, f"line {number} of {path}"), dict):
            raise ValueError(f"a record must be a JSON object, but line {number} of {path} is {line[:50]}")
        shared = row.get("shared", shared)
        if "record" in row:
            name = row.pop("record")
            if name in found:
                raise ValueError(f"the IDs of records must be different, but {name} occurs twice in {path}")
            found[name] = _merge(shared, row)
    return found


def _merge(shared: dict, own: dict) -> dict:
    both = {key: _merge(shared[key], own[key]) for key in shared.keys() & own.keys()}
    return shared | own | both


def add_line(path: Path, name: str, record: dict) -> None:
    """Append a record, which shares nothing, to a file of `read_lines`, in one write; a full disk leaves no part."""
    line = json.dumps({"record": name} | record, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        data = f'{{"shared": {{}}}}\n{line}\n'.encode()
        if (written := file.write(data)) < len(data):
            file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def records_below(records: dict[str, dict], study: str) -> list[dict]:
    """The records of a study's file, sorted by ID."""
    return [record for _, record in sorted(by_id(records, study).items())]


def by_id(records: dict[str, dict], study: str) -> dict[str, dict]:
    """The records of a study's file by ID, in its order."""
    place = f"{study}/"
    return {name.removeprefix(place): record for name, record in records.items() if name.startswith(place)}


def metrics_table(record: dict, *prefixes: str) -> pd.DataFrame:
    """One row per metric, columns `value` and `unit`; if prefixes are given, only metrics that start with one."""
    rows = {name: entry for name, entry in record["metrics"].items() if not prefixes or name.startswith(prefixes)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["value", "unit"])


def fitted_cluster(record: dict) -> Cluster:
    """Read the anchored cluster from a record of the cost model."""
    return build(Cluster, record["config"]["cluster"], "cluster.")
