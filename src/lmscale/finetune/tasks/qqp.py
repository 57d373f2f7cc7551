"""Quora Question Pairs in GLUE's layout: are two questions the same? Known for rows that are broken."""

from pathlib import Path

from ...finetune_config import TaskConfig
from ..examples import PairExample, RowAccount
from ..sources import check_columns, hub_rows, is_on_hub, tsv_rows

LABELS = ("0", "1")  # 1: the same question
_TRAIN = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")


def read_qqp(task: TaskConfig, place: str, account: RowAccount) -> list[PairExample]:
    """Pairs of a `train.tsv` or `dev.tsv` (six columns), a `test.tsv` (three, no labels), or of a hub split.

    Rows with another number of columns or an empty question are left out and counted, as in Megatron-LM; the published
    files have some.

    Raises:
        ValueError: columns are missing.
    """
    return list(_from_hub(task, place, account) if is_on_hub(place) else _from_tsv(place, account))


def _from_tsv(place: str, account: RowAccount):
    header, rows = tsv_rows(Path(place))
    is_labelled = "is_duplicate" in header or "qid1" in header
    check_columns(place, header, _TRAIN if is_labelled else ("id", "question1", "question2"))
    name, first, second = (header.index(column) for column in ("id", "question1", "question2"))
    for where, cells in rows:
        if len(cells) != len(header):
            account.skip(f"not {len(header)} columns", where)
        elif not cells[first].strip() or not cells[second].strip():
            account.skip("an empty question", where)
        elif is_labelled and cells[header.index("is_duplicate")] not in LABELS:
            account.refuse("`is_duplicate` must be 0 or 1", cells[header.index("is_duplicate")], where)
        else:
            label = LABELS.index(cells[header.index("is_duplicate")]) if is_labelled else None
            yield PairExample(cells[name], cells[first], cells[second], label)


def _from_hub(task: TaskConfig, place: str, account: RowAccount):
    for where, row in hub_rows(task, place, ("question1", "question2", "label", "idx")):
        if row["label"] not in (-1, 0, 1):
            account.refuse("`label` must be 0 or 1, or -1 where it is not known", row["label"], where)
        elif not (row["question1"] or "").strip() or not (row["question2"] or "").strip():
            account.skip("an empty question", where)
        else:
            label = None if row["label"] == -1 else row["label"]
            yield PairExample(str(row["idx"]), row["question1"], row["question2"], label)
