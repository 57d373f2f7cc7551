"""Read the committed records.

A study keeps its records in `analysis/<study>/records/`; a record's name is its path below that folder.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lmscale.config.cluster import Cluster
from lmscale.config.from_dict import build

ANALYSIS = Path(__file__).resolve().parents[1]
NEEDED = {  # record -> script that writes it
    "cost_model.json": "scaling/fit_cost_model.py",
    "peak_memory.json": "correctness/peak_memory.py",
    "profile_gpt.json": "benchmarks/trace_shares.py",
    "profile_bert.json": "benchmarks/trace_shares.py",
}


def read_records(folder: Path, needed: Iterable[str] = tuple(NEEDED)) -> dict[str, dict]:
    """Read the records below a folder, by name: the path below `records/`, or below `folder` if there is none.

    Other JSON files are ignored.

    Raises:
        ValueError: one of `needed` is missing, a file cannot be read, or two records have the same name.
    """
    paths = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    names = [path.relative_to(folder).as_posix().rpartition("records/")[2] for path in paths]
    if again := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the names of records must be different, but {', '.join(sorted(again))} occurs twice")
    found = {name: _read(path) for name, path in zip(names, paths, strict=True)}
    records = {
        name: record for name, record in found.items() if isinstance(record, dict) and "record_version" in record
    }
    for name in needed:
        if name not in records:
            raise ValueError(f"`--records` must have {name} (analysis/{NEEDED[name]}), but {folder} does not")
    return records


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`--records` must hold JSON, but {path} is truncated or not JSON: {error}") from error


def records_below(records: dict[str, dict], folder: str) -> list[dict]:
    """The records of a folder, sorted by path."""
    return [record for path, record in sorted(records.items()) if path.startswith(f"{folder}/")]


def metrics_table(record: dict, *prefixes: str) -> pd.DataFrame:
    """One row per metric, columns `value` and `unit`; if prefixes are given, only metrics that start with one."""
    rows = {name: entry for name, entry in record["metrics"].items() if not prefixes or name.startswith(prefixes)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["value", "unit"])


def fitted_cluster(record: dict) -> Cluster:
    """Read the anchored cluster from a record of the cost model."""
    return build(Cluster, record["config"]["cluster"], "cluster.")
