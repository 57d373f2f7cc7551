"""Where our side of a paper's number comes from: records, exact counts, the cost model, or the configuration.

A finder takes a `Context` and says what there is: `Finder`. Nothing here holds a number of ours.
"""

import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..config.cluster import Cluster
from .ledger import PRINTED

REPRODUCED, SCALED_DOWN, MODELLED, SETTING, NOT_RUN = "reproduced", "scaled down", "modelled", "setting", "not run"
KINDS = {
    REPRODUCED: "counted exactly, or run as the paper describes it; so far counts alone: parameters, rows, messages",
    SCALED_DOWN: "measured on a smaller model or other data, named beside it: does not compare with the paper's value",
    MODELLED: "computed by the cost model, which was fitted to part of the paper's scaling study",
    SETTING: "an input, not a result: what the command sets or the cost model takes from the paper",
    NOT_RUN: "we have nothing, and why",
}
_OF_RECORD = {"run": REPRODUCED, "scaled_down": SCALED_DOWN, "modelled": MODELLED}
_DEFINED = ("by definition", "the anchor")  # evidence of the baseline's cells


@dataclass(frozen=True)
class Context:
    """What evidence is drawn from.

    Args:
        records: by their path below `analysis/results`.
        tables: rows of the rendered tables by name, with columns `configuration`, `unit`, `ours` and `evidence`.
        settings: contents of `conf/` by path below it.
        cluster: the fitted cluster of `cost_model.json`.
    """

    records: Mapping[str, dict[str, Any]]
    tables: Mapping[str, pd.DataFrame]
    settings: Mapping[str, dict[str, Any]]
    cluster: Cluster

    def setting(self, file: str, key: str) -> Any:
        """The value of a key in a file of `conf/`; `/` between a group and its key, for sizes have dots."""
        value = self.settings[file]
        for part in key.split("/"):
            value = value[part]
        return value


@dataclass(frozen=True)
class Found:
    """Our side of a number.

    Args:
        kind: of `KINDS`.
        source: the record or code it is from, or why there is none.
        ours: None where there is none.
        unit: where it is not the paper's.
    """

    kind: str
    source: str
    ours: float | str | None = None
    unit: str | None = None


Finder = Callable[[Context], Found]


@dataclass(frozen=True)
class Entry:
    """A number of the paper.

    Args:
        id: `place/configuration/quantity`, place being `table_1`, `figure_5`, `section_4.1`, `appendix_e`, ...
        value: as printed, in `unit`; words where the paper has words.
        find: our side of it.
        command: that would reproduce it.
        origin: how the value was got.
    """

    id: str
    value: float | str
    unit: str
    find: Finder
    command: str
    origin: str = PRINTED


def not_run(why: str) -> Finder:
    """Nothing."""
    return lambda _: Found(NOT_RUN, why)


def counted(code: str, count: Callable[[], float], note: str = "") -> Finder:
    """An exact count, the code that makes it, and what to know of it."""
    return lambda _: Found(REPRODUCED, f"counted by `{code}`{note}", count())


def modelled(what: str, compute: Callable[[Cluster], float]) -> Finder:
    """A figure of the cost model."""
    return lambda context: Found(MODELLED, f"`cost_model.json`, {what}", compute(context.cluster))


def anchored(what: str, compute: Callable[[Cluster], float]) -> Finder:
    """A figure that the cost model or its cluster takes from the paper."""
    return lambda context: Found(SETTING, what, compute(context.cluster))


def setting(file: str, key: str, convert: Callable[[Any], float] = lambda value: value) -> Finder:
    """A key of a file in `conf/`, in the paper's terms."""
    return lambda context: Found(
        SETTING, f"`conf/{file}`, `{key.replace('/', '.')}`", convert(context.setting(file, key))
    )


def combined(file: str, first: str, operation: str, second: str) -> Finder:
    """Two keys of a file in `conf/`, one less (`-`) or over (`/`) the other."""
    compute = {"-": operator.sub, "/": operator.truediv}[operation]
    words = " ".join((first.replace("/", "."), operation, second.replace("/", ".")))

    def find(context: Context) -> Found:
        return Found(
            SETTING, f"`conf/{file}`, `{words}`", compute(*(context.setting(file, k) for k in (first, second)))
        )

    return find


def asked(command: str, *keys: str) -> Finder:
    """The product of keys that a command sets."""
    values = dict(word.split("=", 1) for word in command.split() if "=" in word)
    product = math.prod(int(values[key]) for key in keys)
    return lambda _: Found(SETTING, "the command: " + " x ".join(f"`{key}`" for key in keys), product)


def table_row(table: str, configuration: str, unit: str, why: str) -> Finder:
    """A row of a rendered table; `why` is said where the table has nothing."""

    def find(context: Context) -> Found:
        rows = context.tables[table]
        row = rows[(rows["configuration"] == configuration) & (rows["unit"] == unit)].iloc[0]
        kind, _, role = row["evidence"].partition(", ")
        if kind == NOT_RUN:
            return Found(NOT_RUN, why)
        if kind == "exact":
            return Found(REPRODUCED, "counted by `lmscale.planner.params`", row["ours"])
        if kind in _DEFINED:
            return Found(SETTING, kind, row["ours"])
        record = f"`{row['record']}`" if kind == REPRODUCED else "`cost_model.json`"
        return Found(kind, ", ".join(filter(None, (record, role))), row["ours"])

    return find


def recorded(
    select: Callable[[str], bool], metrics: tuple[str, ...], what: str, why: str, unit: str | None = None
) -> Finder:
    """The median of the first of `metrics` that records have, over all records that have it.

    Args:
        select: of a record's path.
        what: was measured, beside the record's name.
        why: there is nothing, where there is no such record.
        unit: in words, where the record's says too little.
    """

    def find(context: Context) -> Found:
        for metric in metrics:
            found = {
                name: record
                for name, record in sorted(context.records.items())
                if select(name) and metric in record["metrics"]
            }
            if found:
                values = [_value(record["metrics"][metric]) for record in found.values()]
                first = next(iter(found))
                several = f" and {len(found) - 1} more, median" if len(found) > 1 else ""
                stated = found[first]["metrics"][metric]["unit"]
                in_unit = unit or (None if stated == "count" else stated)
                kind = _OF_RECORD[found[first]["kind"]]
                return Found(kind, f"`{first}`{several}: {what}", statistics.median(values), in_unit)
        return Found(NOT_RUN, why)

    return find


def first_of(*finders: Finder) -> Finder:
    """The first that has something, else what the last says."""

    def find(context: Context) -> Found:
        for finder in finders:
            found = finder(context)
            if found.kind != NOT_RUN:
                return found
        return found

    return find


def own_metric(entry_id: str, otherwise: Finder) -> Finder:
    """The metric that a record names by the entry's id: the open door for records made later."""
    return first_of(recorded(lambda _: True, (entry_id,), "its metric of this name", ""), otherwise)


def _value(entry: dict[str, Any]) -> float:
    return float(entry["non_finite"]) if "non_finite" in entry else entry["value"]
