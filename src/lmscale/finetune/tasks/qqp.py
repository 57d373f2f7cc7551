"""Quora Question Pairs in GLUE's layout: are two questions the same? Published files contain broken rows."""

from pathlib import Path
from typing import Any

from ...config.finetune import TaskConfig
from ...evaluation.classification import accuracy, binary_f1
from ..examples import PairExample, RowReport, is_text
from ..sources import check_columns, hub_rows, is_on_hub, tsv_rows

LABELS = ("0", "1")  # 1: the same question
_TRAIN = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")


def score_qqp(chosen: list[int], labels: list[int], facts: dict[str, Any]) -> dict[str, float]:
    """Compute accuracy, and F1 of the class "same question"."""
    return {"accuracy": accuracy(chosen, labels), "f1": binary_f1(chosen, labels)}


def read_qqp(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read pairs of a `train.tsv` or `dev.tsv` (six columns), a `test.tsv` (three, no labels), or of a hub split.

    Rows with a different number of columns or an empty question are skipped and counted, as in Megatron-LM. In a set
    without labels, rows with an empty question are kept and counted, because GLUE expects a prediction for every row.

    Raises:
        ValueError: columns are missing.
    """
    return list(_from_hub(task, place, report) if is_on_hub(place) else _from_tsv(place, report))


def _from_tsv(place: str, report: RowReport):
    header, rows = tsv_rows(Path(place))
    is_labelled = "is_duplicate" in header or "qid1" in header
    check_columns(place, header, _TRAIN if is_labelled else ("id", "question1", "question2"))
    index, first, second = (header.index(column) for column in ("id", "question1", "question2"))
    for where, cells in rows:
        is_empty = len(cells) == len(header) and not (cells[first].strip() and cells[second].strip())
        if len(cells) != len(header) and is_labelled:
            report.skip(f"not {len(header)} columns", where)
        elif len(cells) != len(header):
            report.refuse(f"a row without label must have {len(header)} columns", len(cells), where, "has")
        elif is_empty and is_labelled:
            report.skip("an empty question", where)
        elif is_labelled and cells[header.index("is_duplicate")] not in LABELS:
            report.refuse("`is_duplicate` must be 0 or 1", cells[header.index("is_duplicate")], where)
        elif (name := report.read_id(cells[index], "id", where)) is not None:
            if is_empty:
                report.keep("an empty question", where)
            label = LABELS.index(cells[header.index("is_duplicate")]) if is_labelled else None
            yield PairExample(name, cells[first], cells[second], label)


def _from_hub(task: TaskConfig, place: str, report: RowReport):
    columns = ("question1", "question2", "label", "idx")
    for where, row in hub_rows(task, place, columns, "label", ("not_duplicate", "duplicate")):
        texts = row["question1"] or "", row["question2"] or ""
        if not all(map(is_text, texts)):
            report.refuse("`question1` and `question2` must be texts", texts, where, "are")
            continue
        is_empty = not all(text.strip() for text in texts)
        if type(row["label"]) is not int or not -1 <= row["label"] <= 1:
            report.refuse("`label` must be 0 or 1, or -1 where it is not known", row["label"], where)
        elif is_empty and row["label"] != -1:
            report.skip("an empty question", where)
        elif (name := report.read_id(row["idx"], "idx", where)) is not None:
            if is_empty:
                report.keep("an empty question", where)
            yield PairExample(name, *texts, None if row["label"] == -1 else row["label"])
