"""Tables of single metrics, described by `results.yaml`, and their place in the README and `docs/results.md`."""

import re
import statistics
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

_PLACE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of the table -->)", re.S)
_AGGREGATES = {
    "sum": sum,
    "number": len,
    "largest": lambda values: max(values, key=abs),
    "median": statistics.median,
}


def metric_tables(records: Mapping[str, dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """The tables of `results.yaml` by name: columns `what`, `measured`, `unit` and `record`.

    Raises:
        ValueError: a record has no metric that matches.
    """
    described = yaml.safe_load(Path(__file__).with_name("results.yaml").read_text(encoding="utf-8"))
    return {name: pd.DataFrame([_row(row, records) for row in rows], dtype=object) for name, rows in described.items()}


def _row(row: dict[str, str], records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    value, unit = metric_value(row, records)
    return {"what": row["what"], "measured": value, "unit": unit, "record": row["record"]}


def metric_value(row: Mapping[str, str], records: Mapping[str, dict[str, Any]]) -> tuple[float, str]:
    """Value and unit of a row's metric, or of its aggregate over all metrics and records that match.

    Raises:
        ValueError: the record has no metric that matches, or several without an aggregate.
    """
    metrics = [
        entry for name, record in records.items() if fnmatch(name, row["record"]) for entry in record["metrics"].items()
    ]
    found = [entry for name, entry in metrics if re.fullmatch(row["metric"], name)]
    if not found or (len(found) > 1 and "of" not in row):
        raise ValueError(f"`metric` must match metrics of {row['record']}, but {row['metric']!r} matches {len(found)}")
    values = [entry["value"] for entry in found]
    value = _AGGREGATES[row["of"]](values) if "of" in row else values[0]
    return value, row.get("unit", "" if row.get("of") == "number" else found[0]["unit"])


def findings(records: Mapping[str, dict[str, Any]]) -> list[dict[str, str]]:
    """The findings of `findings.yaml`: `title`, `text` with its values, `figure`, `records`."""
    described = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text(encoding="utf-8"))
    found = []
    for each in described:
        values = {name: metric_value(row, records)[0] for name, row in each["values"].items()}
        names = ", ".join(dict.fromkeys(row["record"] for row in each["values"].values()))
        shown = {"text": each["text"].format(**values), "figure": each.get("figure", ""), "records": names}
        found.append({"title": each["title"]} | shown)
    return found


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Replace each marked place of a page by the Markdown table of its name.

    Raises:
        ValueError: the page has no marked place.
    """
    filled, count = _PLACE.subn(lambda place: f"{place[1]}\n{tables[place[2]]}\n\n{place[3]}", page)
    if not count:
        raise ValueError("a page must contain markers, <!-- table: NAME --> and <!-- end of the table -->")
    return filled
