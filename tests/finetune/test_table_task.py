"""User tasks: tables of texts and classes described in the configuration."""

import gzip
import json
import re

import pytest
import zstandard

from lmscale.config.finetune import TaskConfig, objective_of
from lmscale.finetune.examples import PairExample
from lmscale.finetune.pairs import join_pair
from lmscale.finetune.tasks import benchmark_of, read_examples


def own_task(**changes) -> TaskConfig:
    columns = {"id": "n", "first": "text", "second": None, "label": "class"}
    values = {"columns": columns, "labels": ["bad", "good"], "max_seq_length": 32}
    return TaskConfig(**{"name": "mine", "train": None, "validation": {}} | values | changes)


def write_rows(path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def test_a_table_gives_texts_and_classes_by_name_or_number(tmp_path) -> None:
    rows = [{"n": 7, "text": "a", "class": "good"}, {"n": "8", "text": "b", "class": 0}]
    examples, _ = read_examples(own_task(), write_rows(tmp_path / "rows.jsonl", rows))
    assert examples == [PairExample("7", "a", None, 1), PairExample("8", "b", None, 0)]
    unlabelled = [{"n": 7, "text": "a"}, {"n": 8, "text": "b", "class": None}, {"n": 9, "text": "c", "class": -1}]
    lines = write_rows(tmp_path / "rows.jsonl", unlabelled)
    assert [e.label for e in read_examples(own_task(), lines)[0]] == [None] * 3
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


@pytest.mark.parametrize("low, label", [(-2, -1.0), (-1, -1.0), (0, None)])
def test_minus_one_is_unknown_unless_the_range_holds_it(tmp_path, low: int, label: float | None) -> None:
    task = own_task(labels=None, value_range=[low, 2])
    path = write_rows(tmp_path / "rows.jsonl", [{"n": 1, "text": "a", "class": -1}])
    assert [e.label for e in read_examples(task, path)[0]] == [label]


def test_a_number_that_names_one_label_and_indexes_another_raises(tmp_path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"n": 1, "text": "a", "class": 1}])
    with pytest.raises(ValueError, match="`class` must not be the name of one label and the index of another"):
        read_examples(own_task(labels=["1", "2"]), path)
    assert [e.label for e in read_examples(own_task(labels=["0", "1"]), path)[0]] == [1]


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"n": 1, "text": "a", "class": "ugly"},
            "`class` must be one of bad, good, 0, 1, -1, but is 'ugly'",
        ),
        ({"n": 1, "text": "a", "class": True}, "must be one of bad, good"),
        ({"n": 1, "text": " ", "class": 1}, "texts must not be empty"),
        ({"n": 1, "text": ["a"], "class": 1}, "texts must not be empty"),
        ({"n": 1, "class": 1}, "must have the columns n, text, but lacks text"),
    ],
)
def test_an_invalid_row_of_a_table_raises(tmp_path, row: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_examples(own_task(), write_rows(tmp_path / "rows.jsonl", [row]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"columns": None}, "`name` must be one of squad_v1, squad_v2, race, or come with `columns`"),
        ({"name": "race"}, "`columns` must be null for race"),
        ({"name": "a/b"}, "`name` must be of small letters, digits and underscores, but is 'a/b'"),
        ({"columns": {"text": "first"}}, "`columns` must be given for id, first, second, label, but are for text"),
        ({"columns": {"first": "text", "label": "text"}}, "`columns` must be all names or all numbers, each once"),
        ({"columns": {"first": None}}, "`columns` must be all names or all numbers, each once, with a `first` text"),
        ({"columns": [{"first": "text"}, "text"]}, "`columns` must be given for id, first"),
        ({"columns": []}, "`columns` must be given for id, first, second, label, but are for none"),
        ({"columns": {"first": "text", "label": 1}}, "`columns` must be all names or all numbers, each once"),
        ({"columns": {"first": "text", "classes": 2}}, "`classes` of `columns` must be as many names as `labels`"),
        ({"columns": {"first": "text", "classes": ["good"]}}, "must be as many names as `labels`, each once"),
        (
            {"columns": {"first": "text", "classes": ["good", "so"]}},
            "all of them labels or none, but are ['good', 'so']",
        ),
        ({"value_range": [0, 5]}, "a table must have `labels` or `value_range`, but has both"),
        ({"labels": None}, "a table must have `labels` or `value_range`, but has neither"),
        ({"labels": None, "value_range": [5, 0]}, "`value_range` must be two numbers, the lowest and the highest"),
        ({"metrics": ["pearson"]}, "`metrics` must be of accuracy, f1, matthews, each once"),
        ({"metrics": [["f1"]]}, "`metrics` must be of accuracy, f1, matthews, each once, but is [['f1']]"),
        ({"labels": ["a", "b", "c"], "metrics": ["f1"]}, "`metrics` must be of accuracy, matthews, each once"),
        ({"labels": None, "value_range": [0, 5], "metrics": ["f1"]}, "`metrics` must be of pearson, spearman"),
        ({"path": "GLUE"}, "`path` must be left out for mine, which is not a GLUE task"),
        ({"name": "rte", "path": {"rtee": "RTE"}}, "`path` must be a folder, or folders by cola, sst2"),
        ({"submit": True}, "`submit` must be left out for mine"),
        ({"labels": ["one"]}, "`labels` must be at least two texts"),
        ({"labels": ["one", "one"]}, "`labels` must be at least two texts"),
        ({"labels": ["a\u2028b", "c"]}, "`labels` must be at least two texts, each once on one line"),
        ({"validation": {2024: "dev.tsv"}}, "`validation` and `test` must be paths by name, but hold 2024"),
        ({"validation": {"../dev": "dev.tsv"}}, "`validation` and `test` must be paths by name, but hold '../dev'"),
        ({"hub_name": None, "validation": {"dev": "hub:dev"}}, "`hub_name` must be given for hub:dev, but is null"),
        ({"hub_name": None, "train": "hub:train"}, "`hub_name` must be given for hub:train, but is null"),
    ],
)
def test_a_wrongly_described_table_raises(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        own_task(**changes)


@pytest.mark.parametrize(
    "changes, expected",
    [({}, ["accuracy"]), ({"labels": None, "value_range": [0, 5]}, ["pearson"]), ({"metrics": ["f1"]}, ["f1"])],
)
def test_a_search_compares_a_metric_that_the_table_has(changes: dict, expected: list[str]) -> None:
    task = own_task(**changes)
    assert [*benchmark_of(task).score([0, 1, 1], [0, 1, 0], {})] == [f"mine/{name}" for name in expected]
    assert objective_of(vars(task)) == f"mine/{expected[0]}"


def test_one_text_has_one_separator() -> None:
    assert join_pair([7, 8], None, 1, 2, 32) == ([1, 7, 8, 2], 4)
    assert join_pair([7, 8, 9, 10], None, 1, 2, 4) == ([1, 7, 8, 2], 4)


@pytest.mark.parametrize(
    "value", ["a\tb", "a\nb", "a\r", "a\u2028b", "", "a\ud83d", None, [1], True, 1.0, float("nan")], ids=ascii
)
def test_an_id_that_is_not_one_line_of_a_predictions_file_raises(tmp_path, value) -> None:
    rows = [{"n": 1, "text": "a", "class": "good"}, {"n": value, "text": "b", "class": "bad"}]
    rule = "line 2: `n` must be a whole number or one line of Unicode text without tabs, but is "
    with pytest.raises(ValueError, match=re.escape(rule + repr(value))) as caught:
        read_examples(own_task(), write_rows(tmp_path / "rows.jsonl", rows))
    str(caught.value).encode()  # can be printed


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_a_blank_line_between_rows_is_a_row(tmp_path, form: str) -> None:
    """A row without text in a table of one column; a prediction file would otherwise number the rest differently."""
    rows = {"tsv": ["text", "good film", "", "bad film"], "jsonl": ['{"text": "a"}', "", '{"text": "b"}']}[form]
    path = tmp_path / f"rows.{form}"
    task = own_task(columns={"id": None, "first": "text", "second": None, "label": "class"})
    path.write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"line 3: texts must not be empty.*, but are \[''\]|line 2 must be JSON, but is blank",
    ):
        read_examples(task, str(path))
    path.write_bytes("\r\n".join([*rows[:-2], rows[-1], "", "", ""]).encode())  # at the end it is none
    examples, report = read_examples(task, str(path))
    assert [e.id for e in examples] == ["0", "1"] and report.notes() == []


@pytest.mark.parametrize(
    "labels, value",
    [(["1", "2"], "0"), (["1.0", "2.0"], "1"), (["-1", "1"], "0"), (["1", "0", "2"], "3"), (["bad", "good"], "٠")],
)
def test_only_names_are_labels_where_a_name_could_be_an_index(tmp_path, labels: list[str], value: str) -> None:
    path, task = tmp_path / "rows.tsv", own_task(labels=labels)
    rows = [f"{n}\tfilm\t{name}" for n, name in enumerate(labels)]
    path.write_text("\n".join(["n\ttext\tclass", *rows]), encoding="utf-8")
    assert [e.label for e in read_examples(task, str(path))[0]] == list(range(len(labels)))
    path.write_text("\n".join(["n\ttext\tclass", *rows, f"9\tfilm\t{value}"]), encoding="utf-8")
    line = len(labels) + 2
    rule = f"line {line}: `class` must be one of {', '.join(labels)}.*, but is '{value}'"
    with pytest.raises(ValueError, match=rule):
        read_examples(task, str(path))
    place = write_rows(tmp_path / "rows.jsonl", [{"n": 1, "text": "a", "class": 0}])
    if labels[0] != "bad":
        with pytest.raises(ValueError, match="`class` must (be one of|not be the name of one label and the index)"):
            read_examples(task, place)


def test_a_column_that_a_table_has_twice_raises(tmp_path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("n\ttext\ttext\tclass\n1\ta\tb\tbad\n")
    with pytest.raises(ValueError, match="rows.tsv must have columns of different names, but has 'text' twice"):
        read_examples(own_task(), str(path))


@pytest.mark.parametrize(
    "name, text", [("t.tsv", "n\ttext\tclass\n1\ta\tbad\n"), ("t.jsonl", '{"n": 1, "text": "a", "class": 0}')]
)
@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_table_may_be_packed(tmp_path, name: str, text: str, suffix: str, pack) -> None:
    (tmp_path / (name + suffix)).write_bytes(pack(text.encode()))
    assert read_examples(own_task(), str(tmp_path / (name + suffix)))[0] == [PairExample("1", "a", None, 0)]


def test_only_line_feeds_end_a_row(tmp_path) -> None:
    text = "a\u2028b\x85c\x0bd\x0ce\x1cf\rg\u2029h"
    path = tmp_path / "rows.tsv"
    path.write_bytes(f"n\ttext\tclass\r\n1\t{text}\tbad\r\n2\tb\tgood".encode())
    assert [e.first for e in read_examples(own_task(), str(path))[0]] == [text, "b"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps({"n": 1, "text": text, "class": 0}, ensure_ascii=False).encode() + b"\r\n")
    assert read_examples(own_task(), str(path))[0][0].first == text
