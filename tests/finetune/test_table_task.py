"""User tasks: tables of texts and classes described in the configuration."""

import json
import re

import pytest

from lmscale.config.finetune import TaskConfig
from lmscale.finetune.examples import PairExample
from lmscale.finetune.pairs import join_pair
from lmscale.finetune.tasks import read_examples


def own_task(**changes) -> TaskConfig:
    columns = {"id": "n", "first": "text", "second": None, "label": "class"}
    values = {"columns": columns, "labels": ["bad", "good"], "max_seq_length": 32}
    return TaskConfig(**{"name": "mine", "train": None, "validation": {}} | values | changes)


def test_a_table_gives_texts_and_classes_by_name_or_number(tmp_path) -> None:
    lines = tmp_path / "rows.jsonl"
    rows = [{"n": 7, "text": "a", "class": "good"}, {"n": "8", "text": "b", "class": 0}]
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    examples, _ = read_examples(own_task(), str(lines))
    assert examples == [PairExample("7", "a", None, 1), PairExample("8", "b", None, 0)]
    unlabelled = [{"n": 7, "text": "a"}, {"n": 8, "text": "b", "class": None}, {"n": 9, "text": "c", "class": -1}]
    lines.write_text("\n".join(json.dumps(row) for row in unlabelled))
    assert [e.label for e in read_examples(own_task(), str(lines))[0]] == [None] * 3
    pair = own_task(columns={"id": None, "first": "text", "second": "n", "label": "class"})
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("n\ttext\tclass\none\ttwo\tbad\n")
    examples, _ = read_examples(pair, str(tabs))
    assert examples == [PairExample("0", "two", "one", 0)]


def test_a_tab_separated_label_may_be_an_index(tmp_path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("n\ttext\tclass\n1\ta\t1\n2\tb\tbad\n")
    assert [e.label for e in read_examples(own_task(), str(path))[0]] == [1, 0]
    path.write_text("n\ttext\tclass\n1\ta\t-1\n")
    assert [e.label for e in read_examples(own_task(), str(path))[0]] == [None]
    stars = own_task(labels=["1", "2"])  # names come first
    path.write_text("n\ttext\tclass\n1\ta\t1\n2\tb\t2\n")
    assert [e.label for e in read_examples(stars, str(path))[0]] == [0, 1]


def test_a_number_that_names_one_label_and_indexes_another_raises(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"n": 1, "text": "a", "class": 1}))
    with pytest.raises(ValueError, match="`class` must not be the name of one label and the index of another"):
        read_examples(own_task(labels=["1", "2"]), str(path))
    assert [e.label for e in read_examples(own_task(labels=["0", "1"]), str(path))[0]] == [1]


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"n": 1, "text": "a", "class": "ugly"},
            "`class` must be one of bad, good, or a number from -1 (not known) to 1",
        ),
        ({"n": 1, "text": "a", "class": 2}, "must be one of bad, good"),
        ({"n": 1, "text": "a", "class": True}, "must be one of bad, good"),
        ({"n": 1, "text": " ", "class": 1}, "texts must not be empty"),
        ({"n": 1, "text": ["a"], "class": 1}, "texts must not be empty"),
        ({"n": 1, "class": 1}, "must have n, text, but lacks text"),
    ],
)
def test_an_invalid_row_of_a_table_raises(tmp_path, row: dict, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_examples(own_task(), str(path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"columns": None}, "`name` must be one of mnli, qqp, squad_v1, squad_v2, race, or come with `columns`"),
        ({"name": "qqp"}, "`columns` and `labels` must be null for qqp"),
        ({"name": "a/b"}, "`name` must be of small letters, digits and underscores, but is 'a/b'"),
        ({"columns": {"first": "text"}}, "`columns` must be given for id, first, second, label, but are for first"),
        ({"columns": {"id": 1, "first": "t", "second": None, "label": "c"}}, "`columns` must be names, each once"),
        (
            {"columns": {"id": None, "first": None, "second": "t", "label": "c"}},
            "`columns.first` must be a column's name",
        ),
        ({"labels": ["one"]}, "`labels` must be at least two texts"),
        ({"labels": ["one", "one"]}, "`labels` must be at least two texts"),
        ({"labels": [0, 1]}, "`labels` must be at least two texts"),
        ({"hub_name": None, "validation": {"dev": "hub:dev"}}, "`hub_name` must be given for hub:dev, but is null"),
    ],
)
def test_a_wrongly_described_table_raises(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        own_task(**changes)


def test_one_text_has_one_separator() -> None:
    assert join_pair([7, 8], None, 1, 2, 32) == ([1, 7, 8, 2], 4)
    assert join_pair([7, 8, 9, 10], None, 1, 2, 4) == ([1, 7, 8, 2], 4)
