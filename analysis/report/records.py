"""The committed records, from which everything here is made.

A study keeps its records in `analysis/<study>/records/`, below which a record's path is its name.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lmscale.config.cluster import Cluster
from lmscale.config.from_dict import build

ANALYSIS = Path(__file__).resolve().parents[1]
NEEDED = {  # and what makes them
    "cost_model.json": "scaling/fit_cost_model.py",
    "peak_memory.json": "correctness/peak_memory.py",
    "profile_gpt.json": "benchmarks/trace_shares.py",
    "profile_bert.json": "benchmarks/trace_shares.py",
}


def read_records(folder: Path, needed: Iterable[str] = tuple(NEEDED)) -> dict[str, dict]:
    """The records below a folder by name: the path below `records/`, or below `folder` where that is no part of it.
    Other JSON files are left alone.

    Raises:
        ValueError: one of `needed` is missing, a file cannot be read, or two records have one name.
    """
    paths = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    names = [path.relative_to(folder).as_posix().rpartition("records/")[2] for path in paths]
    if again := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the names of records must be different, but {', '.join(sorted(again))} is there twice")
    found = {name: _read(path) for name, path in zip(names, paths, strict=True)}
    records = {
        name: record for name, record in found.items() if isinstance(record, dict) and "record_version" in record
    }
    for name in needed:
        if name not in records:
            raise ValueError(f"`--records` must have {name} (analysis/{NEEDED[name]}), but {folder} has not")
    return records


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`--records` must hold JSON, but {path} is truncated or no JSON: {error}") from error


def records_below(records: dict[str, dict], folder: str) -> list[dict]:
    """Those of a folder, in the order of their paths."""
    return [record for path, record in sorted(records.items()) if path.startswith(f"{folder}/")]


def metrics_table(record: dict, *prefixes: str) -> pd.DataFrame:
    """One row per metric, columns `value` and `unit`; with prefixes only the metrics whose name begins with one."""
    rows = {name: entry for name, entry in record["metrics"].items() if not prefixes or name.startswith(prefixes)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["value", "unit"])


def fitted_cluster(record: dict) -> Cluster:
    """The anchored cluster of a record of the cost model."""
    return build(Cluster, record["config"]["cluster"], "cluster.")
