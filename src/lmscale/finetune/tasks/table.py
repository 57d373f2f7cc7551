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

    A label is a name of `task.labels`, or its index as on the hub, where -1 means unknown. A number that is the name of
    one label and the index of another is refused. Rows have no label if the column is missing or a JSON value is null.

    Raises:
        ValueError: columns are missing.
    """
    columns = task.columns
    needed = tuple(columns[key] for key in ("id", "first", "second") if columns[key] is not None)
    examples = []
    for number, (where, row) in enumerate(_rows(task, place, needed, report)):
        missing = [name for name in needed if name not in row]
        if missing:
            raise ValueError(f"{place} {where} must have {', '.join(needed)}, but lacks {missing[0]}")
        texts = [row[columns[key]] for key in ("first", "second") if columns[key] is not None]
        label = row.get(columns["label"])
        name = str(label)
        is_ambiguous = type(label) is int and name in task.labels and task.labels.index(name) != label
        label = task.labels.index(label) if label in task.labels else label
        if not all(is_text(text) and text.strip() for text in texts):
            report.refuse("texts must not be empty", texts, where)
        elif is_ambiguous:
            rule = f"`{columns['label']}` must not be the name of one label and the index of another"
            report.refuse(rule, label, where)
        elif label is not None and (type(label) is not int or not -1 <= label < len(task.labels)):
            rule = f"`{columns['label']}` must be one of {', '.join(task.labels)}, or a number from -1 (not known) to "
            report.refuse(f"{rule}{len(task.labels) - 1}", label, where)
        else:
            name = str(number if columns["id"] is None else row[columns["id"]])
            known = None if label == -1 else label
            examples.append(PairExample(name, texts[0], texts[1] if len(texts) > 1 else None, known))
    return examples


def _rows(
    task: TaskConfig, place: str, needed: tuple[str, ...], report: RowReport
) -> Iterator[tuple[str, dict[str, Any]]]:
    if is_on_hub(place):
        yield from hub_rows(task, place, needed)
    elif place.endswith((".jsonl", ".jsonl.gz")):
        yield from jsonl_rows(Path(place))
    else:
        header, rows = tsv_rows(Path(place))
        check_columns(place, header, needed)
        for where, cells in rows:
            if len(cells) == len(header):
                row: dict[str, Any] = dict(zip(header, cells, strict=True))
                label = row.get(task.columns["label"], "")
                if label not in task.labels and re.fullmatch(r"-?\d+", label):
                    row[task.columns["label"]] = int(label)  # an index
                yield where, row
            else:
                report.refuse(f"a row must have {len(header)} columns", len(cells), where)


def score_classes(chosen: list[int], labels: list[int], facts: dict[str, Any]) -> dict[str, float]:
    """Compute the accuracy in percent."""
    return {"accuracy": accuracy(chosen, labels)}
