"""Tables of one or two texts with a class or a number: GLUE's tasks, and a user's own."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...config.finetune import GLUE, TABLE_COLUMNS, TaskConfig, metrics_of
from ...text.input_files import packing_of
from ...text.tables import check_columns, jsonl_rows, tsv_rows
from .. import sources
from ..examples import PairExample, RowReport, is_text
from ..metrics import METRICS

Layout = dict[str, str | int | None]  # columns of `TaskConfig`
_NUMBER = re.compile(r"[-+]?[0-9.]+")


def read_table(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read the rows of a tab-separated file without quoting, of JSON lines (`.jsonl`), or of a hub split; a file may be
    packed as .gz or .zst.

    A label is a name of `task.labels` or its index; -1 means unknown. The hub's class names count, in any order, if one
    of them is a label; otherwise its numbers do. If a name is a number other than its own index, only names are
    accepted, as in GLUE's files. A row has no label if the column is missing or its JSON value is null.
    """
    read_label = partial(_number, task) if task.labels is None else partial(_class, _classes(task), task)
    examples = []
    for number, (where, layout, row) in enumerate(_rows(task, place, report)):
        given = [row[layout[key]] for key in ("first", "second") if layout.get(key) is not None]
        texts = ["" if text is None and task.skip_broken else text for text in given]
        label = row.get(layout.get("label"))
        rule, known = (None, None) if label is None else read_label(label, layout)
        is_blank = all(map(is_text, texts)) and not all(text.strip() for text in texts)
        if not all(map(is_text, texts)) or (is_blank and task.name not in GLUE):
            report.refuse("texts must not be empty, of another type or invalid Unicode", texts, where, "are")
        elif is_blank and label not in (None, -1) and task.skip_broken:
            report.note("skipped", "an empty text", where)
        elif rule is not None:
            report.refuse(f"{_name(layout['label'])} must {rule}", label, where)
        else:
            id_column = layout.get("id")
            name = str(number) if id_column is None else report.read_id(row[id_column], id_column, where)
            if name is not None:
                if is_blank:
                    report.note("kept", "an empty text", where)
                examples.append(PairExample(name, texts[0], texts[1] if len(texts) > 1 else None, known))
    return examples


def _classes(task: TaskConfig) -> dict[str, int | None]:
    """The class of each form of a label; None: not known."""
    names = {name: number for number, name in enumerate(task.labels)}
    indices = {str(number): number for number in names.values()}
    if any(_NUMBER.fullmatch(name) and indices.get(name) != names[name] for name in names):
        indices = {}  # 1 could be the class "1" or the second one
    return {**names, **indices, "-1": None} | names


def _class(
    classes: dict[str, int | None], task: TaskConfig, label: Any, layout: Layout
) -> tuple[str | None, int | None]:
    """The rule that a label breaks, or its class."""
    order = layout.get("classes")
    if order and type(label) is int and 0 <= label < len(order):
        return None, task.labels.index(order[label]) if order[label] in task.labels else label
    if type(label) is int and str(label) in task.labels and task.labels.index(str(label)) != label:
        return "not be the name of one label and the index of another", None
    known = {name: classes[name] for name in task.labels} if task.name in GLUE and type(label) is str else classes
    if type(label) not in (int, str) or str(label) not in known:
        return f"be one of {', '.join(known)}", None
    return None, known[str(label)]


def _number(task: TaskConfig, label: Any, layout: Layout) -> tuple[str | None, float | None]:
    """The rule that a label breaks, or its value."""
    low, high = task.value_range
    try:
        value = float(label) if type(label) is not bool else None
    except (TypeError, ValueError, OverflowError):
        value = None
    if value == -1 < low:  # as the hub marks an unknown one
        return None, None
    is_valid = value is not None and low <= value <= high
    return (None, value) if is_valid else (f"be a number from {low:g} to {high:g}", None)


def _rows(task: TaskConfig, place: str, report: RowReport) -> Iterator[tuple[str, Layout, dict[str | int, Any]]]:
    """The location of each row, the layout of the columns, and the row."""
    if sources.is_on_hub(place):
        table, source = sources.load_hub(task, place), sources.name_of_split(task, place)
        layout = _choose_layout(task, source, table.column_names)
        names = getattr(table.features.get(layout.get("label")), "names", None) or []
        order = layout.get("classes") or task.labels or []
        is_named = not set(names).isdisjoint(order)
        for number, row in enumerate(table):
            if is_named and type(row[layout["label"]]) is int and row[layout["label"]] >= 0:
                name = names[row[layout["label"]]]
                row |= {layout["label"]: order.index(name) if name in order else name}
            yield f"row {number}", layout, row
    elif place.removesuffix(packing_of(place)).endswith(".jsonl"):
        for where, row in jsonl_rows(Path(place)):
            yield where, _choose_layout(task, f"{place} {where}", [*row]), row
    else:
        header, rows = tsv_rows(Path(place), partial(_has_header, task))
        layout = _choose_layout(task, f"line 1 of {place}", header)
        for where, cells in rows:
            if len(cells) == len(header):
                yield where, layout, dict(zip(header, cells, strict=True))
            elif task.skip_broken and layout.get("label") in header:
                report.note("skipped", f"not {len(header)} columns", where)
            else:
                report.refuse(f"a row must have {len(header)} columns", len(cells), where, "has")


def _has_header(task: TaskConfig, cells: list[str]) -> bool:
    """Whether the first line of a file names columns; of a task without columns by number it must."""
    columns = {layout.get(key) for layout in task.layouts for key in TABLE_COLUMNS}
    return all(isinstance(column, str | None) for column in columns) or not columns.isdisjoint(cells)


def _choose_layout(task: TaskConfig, source: str, header: Sequence[str | int]) -> Layout:
    """The first layout that a table has; of one layout, the column of labels may be missing.

    Raises:
        ValueError: it has none; the message is about that of which the fewest columns are missing.
    """
    is_only = len(task.layouts) == 1
    needed = [
        tuple(layout[key] for key in TABLE_COLUMNS if layout.get(key) is not None and not (is_only and key == "label"))
        for layout in task.layouts
    ]
    missing = [sum(column not in header for column in columns) for columns in needed]
    best = missing.index(min(missing))
    if missing[best] and isinstance(header, range) and isinstance(needed[best][0], int):
        rule = f"at least {max(needed[best]) + 1} columns or a line of their names"
        raise ValueError(f"{source} must have {rule}, but has {len(header)}")
    check_columns(source, header, needed[best])
    return task.layouts[best]


def _name(column: str | int) -> str:
    return f"`{column}`" if isinstance(column, str) else f"column {column} (from 0)"


def scores_of_table(task: TaskConfig, found: list[Any], labels: list[Any], facts: dict[str, Any]) -> dict[str, float]:
    """The task's metrics, in percent."""
    return {f"{task.name}/{name}": METRICS[name](found, labels) for name in metrics_of(vars(task))}
