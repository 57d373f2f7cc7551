"""A user table: one or two texts per row and their class, with columns and labels named in the configuration."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...config.finetune import TaskConfig
from ...evaluation.classification import accuracy
from ..examples import PairExample, RowReport, is_text
from ..sources import check_columns, hub_rows, is_on_hub, jsonl_rows, tsv_rows


def read_table(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read rows of a tab-separated file with header and without quoting, of JSON lines (`.jsonl`, `.jsonl.gz`), or of a
    hub split.

    A label is a name of `task.labels`, or its index as on the hub, where -1 means unknown. If a name is a number other
    than its index, labels are given by name only. Rows have no label if the column is missing or a JSON value is null.

    Raises:
        ValueError: columns are missing.
    """
    columns, labels = task.columns, task.labels
    classes, forms = _classes(labels)
    needed = tuple(columns[key] for key in ("id", "first", "second") if columns[key] is not None)
    examples = []
    for number, (where, row) in enumerate(_rows(task, place, needed, report)):
        missing = [name for name in needed if name not in row]
        if missing:
            raise ValueError(f"{place} {where} must have {', '.join(needed)}, but lacks {missing[0]}")
        texts = [row[columns[key]] for key in ("first", "second") if columns[key] is not None]
        label = row.get(columns["label"])
        is_ambiguous = type(label) is int and str(label) in labels and labels.index(str(label)) != label
        if not all(is_text(text) and text.strip() for text in texts):
            report.refuse("texts must not be empty, of another type or invalid Unicode", texts, where, "are")
        elif is_ambiguous:
            rule = f"`{columns['label']}` must not be the name of one label and the index of another"
            report.refuse(rule, label, where)
        elif label is not None and (type(label) not in (int, str) or str(label) not in classes):
            report.refuse(f"`{columns['label']}` must be {forms}", label, where)
        else:
            known = None if label is None else classes[str(label)]
            name = str(number) if columns["id"] is None else report.read_id(row[columns["id"]], columns["id"], where)
            if name is not None:
                examples.append(PairExample(name, texts[0], texts[1] if len(texts) > 1 else None, known))
    return examples


def _classes(labels: list[str]) -> tuple[dict[str, int | None], str]:
    """Return the class of each form of a label (None: not known), and the forms in words."""
    indices = {str(index): index for index in range(len(labels))}
    names = {name: index for index, name in enumerate(labels)}
    numbers = f"a number from -1 (not known) to {len(labels) - 1}"
    if any(re.fullmatch(r"[-+]?[0-9.]+", name) and indices.get(name) != names[name] for name in names):
        indices, numbers = {}, "-1 (not known)"  # 1 could be the class "1" or the second one
    classes = {"-1": None} | indices | names
    return classes, f"one of {', '.join(labels)}" + ("" if "-1" in labels else f", or {numbers}")


def _rows(
    task: TaskConfig, place: str, needed: tuple[str, ...], report: RowReport
) -> Iterator[tuple[str, dict[str, Any]]]:
    if is_on_hub(place):
        yield from hub_rows(task, place, needed, task.columns["label"], task.labels)
    elif place.endswith((".jsonl", ".jsonl.gz")):
        yield from jsonl_rows(Path(place))
    else:
        header, rows = tsv_rows(Path(place))
        check_columns(place, header, needed)
        for where, cells in rows:
            if len(cells) == len(header):
                yield where, dict(zip(header, cells, strict=True))
            else:
                report.refuse(f"a row must have {len(header)} columns", len(cells), where, "has")


def score_classes(chosen: list[int], labels: list[int], facts: dict[str, Any]) -> dict[str, float]:
    """Compute the accuracy in percent."""
    return {"accuracy": accuracy(chosen, labels)}
