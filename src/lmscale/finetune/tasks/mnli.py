"""MultiNLI in GLUE's layout: a premise, a hypothesis, and one of three relations."""

from pathlib import Path

from ...config.finetune import TaskConfig
from ..examples import PairExample, RowReport, is_text
from ..sources import check_columns, hub_rows, is_on_hub, tsv_rows

LABELS = ("contradiction", "entailment", "neutral")  # numbered as in Megatron-LM
_HUB_LABELS = ("entailment", "neutral", "contradiction")  # as nyu-mll/glue numbers them
_RULE = f"`gold_label` must be one of {', '.join(LABELS)}"


def name_mnli(set_name: str) -> str:
    """Return GLUE's file name for the predictions of a set."""
    return "MNLI-mm.tsv" if "mismatched" in set_name else "MNLI-m.tsv"


def read_mnli(task: TaskConfig, place: str, report: RowReport) -> list[PairExample]:
    """Read pairs of a `train.tsv`, `dev_*.tsv` (16 columns), `test_*.tsv` (no labels), or of a hub split.

    The id is the column `index`, which identifies the row in the submission file.

    Raises:
        ValueError: columns are missing.
    """
    return list(_from_hub(task, place, report) if is_on_hub(place) else _from_tsv(place, report))


def _from_tsv(place: str, report: RowReport):
    header, rows = tsv_rows(Path(place))
    check_columns(place, header, ("index", "sentence1", "sentence2"))
    index, first, second = (header.index(name) for name in ("index", "sentence1", "sentence2"))
    gold = header.index("gold_label") if "gold_label" in header else None
    for where, cells in rows:
        if len(cells) != len(header):
            report.refuse(f"a row must have {len(header)} columns", len(cells), where, "has")
        elif gold is not None and cells[gold] not in LABELS:
            report.refuse(_RULE, cells[gold], where)
        elif (name := report.read_id(cells[index], "index", where)) is not None:
            label = None if gold is None else LABELS.index(cells[gold])
            yield PairExample(name, cells[first], cells[second], label)


def _from_hub(task: TaskConfig, place: str, report: RowReport):
    for where, row in hub_rows(task, place, ("premise", "hypothesis", "label", "idx"), "label", _HUB_LABELS):
        texts = row["premise"], row["hypothesis"]
        if type(row["label"]) is not int or not -1 <= row["label"] <= 2:  # -1: a test set
            report.refuse("`label` must be one of 0, 1, 2, or -1 where it is not known", row["label"], where)
        elif not all(map(is_text, texts)):
            report.refuse("`premise` and `hypothesis` must be texts", texts, where, "are")
        elif (name := report.read_id(row["idx"], "idx", where)) is not None:
            label = None if row["label"] == -1 else LABELS.index(_HUB_LABELS[row["label"]])
            yield PairExample(name, *texts, label)
