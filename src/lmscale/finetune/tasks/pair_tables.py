"""Tables of texts and their class: MNLI and QQP in GLUE's layout, and a user's own table."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.finetune import TaskConfig
from ...text.input_files import packing_of
from ...text.tables import check_columns, jsonl_rows, tsv_rows
from ..examples import PairExample, RowReport, is_text
from ..sources import hub_rows, is_on_hub
from .benchmark import accuracy

MNLI_LABELS = ("contradiction", "entailment", "neutral")  # numbered as in Megatron-LM
QQP_LABELS = ("0", "1")  # 1: the same question
_MNLI_ON_HUB = ("entailment", "neutral", "contradiction")  # as nyu-mll/glue numbers them


@dataclass(frozen=True)
class PairTable:
    """Where a table has its texts and labels.

    Args:
        id: column of ids; None numbers the rows.
        texts: columns of one or two texts.
        label: column of labels; rows have none if it is missing or null.
        classes: class of each form of a label; None: not known.
        on_hub: names of the classes on the hub, by number.
        allows_blank: texts may be empty.
        skips_broken: labelled rows with an empty text or a different number of columns are skipped and counted.
    """

    id: str | None
    texts: tuple[str, ...]
    label: str
    classes: dict[str, int | None]
    on_hub: tuple[str, ...] = ()
    allows_blank: bool = True
    skips_broken: bool = False


def read_mnli(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read pairs of a `train.tsv`, `dev_*.tsv`, `test_*.tsv` (no labels), or of a hub split.

    The id is the column `index`, which identifies the row in the submission file.
    """
    if is_on_hub(place):
        classes = {str(n): MNLI_LABELS.index(name) for n, name in enumerate(_MNLI_ON_HUB)} | {"-1": None}
        table = PairTable("idx", ("premise", "hypothesis"), "label", classes, _MNLI_ON_HUB)
    else:
        classes = {name: number for number, name in enumerate(MNLI_LABELS)}
        table = PairTable("index", ("sentence1", "sentence2"), "gold_label", classes)
    return _read(table, task, place, report)


def read_qqp(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read pairs of a `train.tsv` or `dev.tsv` (six columns), a `test.tsv` (three, no labels), or of a hub split.

    Published files contain broken rows, which are skipped as in Megatron-LM. In a set without labels, rows with an
    empty question are kept and counted, because GLUE expects a prediction for every row.
    """
    texts, classes = ("question1", "question2"), {"0": 0, "1": 1}
    if is_on_hub(place):
        names = ("not_duplicate", "duplicate")
        table = PairTable("idx", texts, "label", classes | {"-1": None}, names, skips_broken=True)
    else:
        table = PairTable("id", texts, "is_duplicate", classes, skips_broken=True)
    return _read(table, task, place, report)


def read_table(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read rows of a tab-separated file with header and without quoting, of JSON lines (`.jsonl`), or of a hub split;
    either file may be packed as .gz or .zst.

    A label is a name of `task.labels`, or its index as on the hub, where -1 means unknown. If a name is a number other
    than its index, labels are given by name only. Rows have no label if the column is missing or a JSON value is null.
    """
    names = {name: number for number, name in enumerate(task.labels)}
    indices = {str(number): number for number in names.values()}
    if any(re.fullmatch(r"[-+]?[0-9.]+", name) and indices.get(name) != names[name] for name in names):
        indices = {}  # 1 could be the class "1" or the second one
    columns = task.columns
    texts = tuple(columns[key] for key in ("first", "second") if columns[key] is not None)
    classes = {**names, **indices, "-1": None} | names
    table = PairTable(columns["id"], texts, columns["label"], classes, tuple(task.labels), allows_blank=False)
    return _read(table, task, place, report)


def _read(table: PairTable, task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    rule = f"`{table.label}` must be one of {', '.join(table.classes)}"
    examples = []
    for number, (where, row) in enumerate(_rows(table, task, place, report)):
        texts = ["" if row[name] is None and table.skips_broken else row[name] for name in table.texts]
        label = row.get(table.label)
        is_labelled = label not in (None, -1)
        is_blank = all(map(is_text, texts)) and not all(text.strip() for text in texts)
        if not all(map(is_text, texts)) or (is_blank and not table.allows_blank):
            report.refuse("texts must not be empty, of another type or invalid Unicode", texts, where, "are")
        elif is_blank and is_labelled and table.skips_broken:
            report.note("skipped", "an empty question", where)
        elif type(label) is int and task.columns is not None and _is_ambiguous(label, task.labels):
            report.refuse(f"`{table.label}` must not be the name of one label and the index of another", label, where)
        elif label is not None and (type(label) not in (int, str) or str(label) not in table.classes):
            report.refuse(rule, label, where)
        else:
            name = str(number) if table.id is None else report.read_id(row[table.id], table.id, where)
            if name is not None:
                if is_blank and table.skips_broken:
                    report.note("kept", "an empty question", where)
                known = None if label is None else table.classes[str(label)]
                examples.append(PairExample(name, texts[0], texts[1] if len(texts) > 1 else None, known))
    return examples


def _is_ambiguous(label: int, labels: list[str]) -> bool:
    return str(label) in labels and labels.index(str(label)) != label


def _rows(table: PairTable, task: TaskConfig, place: str, report: RowReport) -> Iterator[tuple[str, dict[str, Any]]]:
    needed = tuple(name for name in (table.id, *table.texts) if name is not None)
    if is_on_hub(place):
        yield from hub_rows(task, place, needed, table.label, table.on_hub)
    elif place.removesuffix(packing_of(place)).endswith(".jsonl"):
        for where, row in jsonl_rows(Path(place)):
            check_columns(f"{place} {where}", [*row], needed)
            yield where, row
    else:
        header, rows = tsv_rows(Path(place))
        check_columns(f"line 1 of {place}", header, needed)
        for where, cells in rows:
            if len(cells) == len(header):
                yield where, dict(zip(header, cells, strict=True))
            elif table.skips_broken and table.label in header:
                report.note("skipped", f"not {len(header)} columns", where)
            else:
                report.refuse(f"a row must have {len(header)} columns", len(cells), where, "has")


def name_mnli(set_name: str) -> str:
    """Return GLUE's file name for the predictions of a set; its diagnostic set is called AX there."""
    if set_name == "ax" or "diagnostic" in set_name:
        return "AX.tsv"
    return "MNLI-mm.tsv" if "mismatched" in set_name else "MNLI-m.tsv"


def score_mnli(chosen: list[int], labels: list[int], facts: dict[str, Any]) -> dict[str, float]:
    """Compute the accuracy in percent."""
    return {"mnli/accuracy": accuracy(chosen, labels)}


def score_qqp(chosen: list[int], labels: list[int], facts: dict[str, Any]) -> dict[str, float]:
    """Compute accuracy and F1 of the class "same question" in percent: 2 TP / (2 TP + FP + FN), or 0 without any.

    Source: GLUE's score of QQP (Wang et al. 2018).
    """
    hits = sum(a == b == 1 for a, b in zip(chosen, labels, strict=True))
    counted = chosen.count(1) + labels.count(1)
    return {"qqp/accuracy": accuracy(chosen, labels), "qqp/f1": 200.0 * hits / counted if counted else 0.0}
