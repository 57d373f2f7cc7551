"""Readers of the official formats, and their messages on invalid rows."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from finetuning import make_task, squad_json, write_task

from lmscale.finetune import sources
from lmscale.finetune.glue import submission_file
from lmscale.finetune.sources import fingerprint
from lmscale.finetune.tasks import read_examples


def tsv(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
MNLI = "index\tsentence1\tsentence2\tgold_label"


def test_the_real_files_are_read_completely(shared_data) -> None:
    counts = {}
    for task, place in (
        ("mnli", "mnli/train.shared.tsv"),
        ("mnli", "mnli/glue_columns.shared.tsv"),
        ("mnli", "mnli/dev_mismatched.shared.tsv"),
        ("qqp", "qqp/train.shared.tsv"),
        ("qqp", "qqp/with_ids.shared.tsv"),
        ("race", "race/race_dev.jsonl.gz"),
        ("squad_v1", "squad/dev-v1.1.shared.json"),
        ("squad_v2", "squad/dev-v2.0.shared.json"),
    ):
        examples, report = read_examples(make_task(task), str(shared_data / place))
        assert report.notes() == []
        counts[place.split("/")[1].split(".")[0]] = len(examples)
    assert counts == {
        "train": 8999,  # of both tasks
        "glue_columns": 254,
        "dev_mismatched": 531,
        "with_ids": 669,
        "race_dev": 4887,
        "dev-v1": 5475,
        "dev-v2": 6078,
    }


def test_labels_are_numbered_as_in_megatron(shared_data) -> None:
    examples, _ = read_examples(make_task("mnli"), str(shared_data / "mnli/dev_matched.shared.tsv"))
    labels = [example.label for example in examples]
    assert [labels.count(number) for number in range(3)] == [155, 178, 164]  # contradiction, entailment, neutral
    pairs, _ = read_examples(make_task("qqp"), str(shared_data / "qqp/with_ids.shared.tsv"))
    assert sum(pair.label for pair in pairs) == 259 and pairs[0].id == "712"


def test_race_is_read_from_folders_and_from_lines(shared_data, tmp_path) -> None:
    folder = shared_data / "race/sample-original-layout/dev"
    from_folder, _ = read_examples(make_task("race"), str(folder))
    assert {e.group for e in from_folder} == {"middle", "high"} and len(from_folder) > 100
    lines = [file.read_text(encoding="utf-8").strip() for file in sorted(folder.rglob("*.txt"))]
    with gzip.open(tmp_path / "dev.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    from_lines, _ = read_examples(make_task("race"), str(tmp_path / "dev.jsonl.gz"))
    assert sorted(from_folder, key=lambda e: e.id) == sorted(from_lines, key=lambda e: e.id)


def test_a_single_level_can_be_scored(shared_data) -> None:
    examples, _ = read_examples(make_task("race"), str(shared_data / "race/sample-original-layout/dev/high"))
    assert {e.group for e in examples} == {"high"}


def test_predictions_are_named_as_glue_names_them() -> None:
    sets = ("dev_matched", "test_mismatched", "diagnostic", "ax")
    assert [submission_file("mnli", name) for name in sets] == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv", "AX.tsv"]


def test_a_test_file_needs_no_labels(tmp_path) -> None:
    place = tsv(tmp_path / "test.tsv", "index\tsentence1\tsentence2", "0\ta\tb")
    assert read_examples(make_task("mnli"), place)[0][0].label is None
    place = tsv(tmp_path / "qqp.tsv", "id\tquestion1\tquestion2", "0\ta\tb")
    assert read_examples(make_task("qqp"), place)[0][0].label is None


def test_malformed_rows_of_qqp_are_skipped_and_counted(tmp_path) -> None:
    rows = ["1\t0\t0\twhy\twhat\t1", "2\t0\t0\t\twhat\t0", "3\t0\t0\twhy", "4\t0\t0\twhy\t \t1", "5\t0\t0\ta\tb\t0"]
    examples, report = read_examples(make_task("qqp"), tsv(tmp_path / "t.tsv", QQP, *rows))
    assert [e.id for e in examples] == ["1", "5"]
    assert report.noted["skipped"] == {"an empty text": ["line 3", "line 5"], "not 6 columns": ["line 4"]}
    assert report.notes() == [
        "2 rows skipped, an empty text: line 3, line 5",
        "1 row skipped, not 6 columns: line 4",
    ]


def test_an_unlabelled_set_keeps_every_row_of_qqp(tmp_path) -> None:
    header = "id\tquestion1\tquestion2"
    place = tsv(tmp_path / "test.tsv", header, "0\twhy\twhat", "1\t\twhat", "2\twhy\t ")
    examples, report = read_examples(make_task("qqp"), place)
    assert [e.id for e in examples] == ["0", "1", "2"]
    assert report.noted["kept"] == {"an empty text": ["line 3", "line 4"]}
    assert report.notes() == ["2 rows kept, an empty text: line 3, line 4"]
    with pytest.raises(ValueError, match="line 3: a row must have 3 columns, but has 2"):
        read_examples(make_task("qqp"), tsv(tmp_path / "short.tsv", header, "0\twhy\twhat", "1\twhy"))


def test_crlf_and_blank_lines_are_not_part_of_the_data(tmp_path) -> None:
    path = write_task(tmp_path, "qqp", 3)
    expected = read_examples(make_task("qqp"), str(path))[0]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n", 3) + b"\r\n\n")  # both kinds in one file
    examples, report = read_examples(make_task("qqp"), str(path))
    assert examples == expected and report.notes() == []


def test_labels_for_only_some_examples_raise(tmp_path) -> None:
    passages = [GOOD | {"id": f"high{n}.txt", "answers": None if n == 1 else ["A", "B"]} for n in range(3)]
    path = tmp_path / "race.jsonl"
    path.write_text("\n".join(map(json.dumps, passages)), encoding="utf-8")
    with pytest.raises(ValueError, match="a label or none, but 2 of 6 have none: examples 3, 4"):
        read_examples(make_task("race"), str(path))
    data = squad_json("squad_v1", 4)
    del data["data"][0]["paragraphs"][2]["qas"][0]["answers"]
    (tmp_path / "squad.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match="but 1 of 4 have none: examples 3"):
        read_examples(make_task("squad_v1"), str(tmp_path / "squad.json"))


@pytest.mark.parametrize(
    "task, lines, message",
    [
        (
            "qqp",
            [QQP, "1\t0\t0\ta\tb\t1", "2\t0\t0\ta\tb\tyes", "3\t0\t0\ta\tb\t7"],
            "line 3: .*one of 0, 1, but is 'yes'; 2",
        ),
        ("mnli", [MNLI, "1\ta\tb\tmaybe"], "line 2: `gold_label` must be one of contradiction.*'maybe'"),
        ("mnli", [MNLI, "1\ta\tb"], "line 2: a row must have 4 columns, but has 3"),
        ("mnli", ["index\tsentence1", "1\ta"], "lacks sentence2"),
        ("qqp", ["id,question1,question2,is_duplicate", "1,a,b,0"], "separated by commas, not by tabs"),
        ("qqp", ['[{"id": "1", "question1": "a"}]'], r"it is JSON, of which FILE\.jsonl with one object per line"),
        ("mnli", ["[", "{}", "]"], "it is JSON"),
        (
            "mnli",
            ["a film\tgood", "b\tc"],
            "line 1 of .*lacks index, sentence1, sentence2; it has a film, good$",
        ),
        ("mnli", [MNLI], "at least one example"),
        ("mnli", [MNLI, "1\ta\tb\tneutral", "1\tc\td\tneutral"], "'1' is there twice, examples 1 and 2"),
        ("mnli", [""], "begin with a line of column names, but is empty"),
        ("mnli", ["", MNLI], "begin with a line of column names, but line 1 is empty"),
        ("mnli", [f"{MNLI}\r1\ta\tb\tneutral"], "must have lines that end in LF or CR LF, but line 1 has a lone CR"),
    ],
)
def test_invalid_tables_raise_with_their_rows(tmp_path, task, lines, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_examples(make_task(task), tsv(tmp_path / "t.tsv", *lines))


GOOD = {"id": "high1.txt", "article": "a", "questions": ["q", "r"], "options": [["a"] * 4] * 2, "answers": ["A", "B"]}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"answers": ["A", "E"]}, "line 1 question 2: `answers` must be A, B, C or D, but is 'E'"),
        ({"questions": ["", "r"]}, "line 1 question 1: a question must be a non-empty text"),
        ({"options": [["a"] * 4, ["a"] * 3]}, "question 2: `options` must be four texts"),
        ({"answers": ["A"]}, r"lists of equal length, but are of lengths \[2, 2, 1\]"),
        ({"options": [["a"] * 4, ["a", "b", None, 4]]}, "question 2: `options` must be four texts"),
        ({"id": 7, "level": "high"}, "line 1: `id` must be a text, but is 7"),
        ({"id": "high\ud800"}, "line 1: `id` must be a text"),
        ({"id": "1.txt"}, "the level must be middle or high"),
        ({"article": None}, "line 1: `article` must be a text, but is None"),
    ],
)
def test_invalid_race_passages_raise_with_their_rows(tmp_path, changes, message) -> None:
    path = tmp_path / "race.jsonl"
    path.write_text(json.dumps(GOOD | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_examples(make_task("race"), str(path))


def test_hidden_files_in_a_folder_of_race_are_skipped_and_counted(shared_data, tmp_path) -> None:
    sample = shared_data / "race/sample-original-layout/dev"
    shutil.copytree(sample, tmp_path / "dev", copy_function=shutil.copyfile)
    copies = tmp_path / "dev/high/.ipynb_checkpoints"
    copies.mkdir()
    article = min((sample / "high").glob("*.txt"))
    for hidden in (copies / article.name, tmp_path / "dev/middle" / f"._{article.name}"):
        shutil.copyfile(article, hidden)
    examples, report = read_examples(make_task("race"), str(tmp_path / "dev"))
    assert examples == read_examples(make_task("race"), str(sample))[0]
    assert len(report.noted["skipped"]["hidden file or folder"]) == 2


def test_an_empty_file_of_race_is_refused(tmp_path) -> None:
    for name, text in (("middle/1.txt", ""), ("high/1.txt", json.dumps(GOOD))):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="middle/1.txt: a file must have an article, but is ''"):
        read_examples(make_task("race"), str(tmp_path))


@pytest.mark.parametrize("name", ["mnli", "race", "squad_v1"])
def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path, name: str) -> None:
    path = write_task(tmp_path, name, 3)
    expected = read_examples(make_task(name), str(path))[0]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_examples(make_task(name), str(path))[0] == expected


def test_damaged_and_malicious_files_raise_one_line(tmp_path) -> None:
    packed = bytearray(gzip.compress(b'{"data": []}' * 50))
    packed[12] ^= 255
    for name, task, data in (
        ("x.json.gz", "squad_v1", bytes(packed)),
        ("x.json", "squad_v1", b"[" * 100_000),
        ("x.json", "squad_v1", b"9" * 5000),
        ("x.jsonl", "race", b"9" * 5000),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}.* must be (readable as UTF-8 text|JSON), but fails") as caught:
            read_examples(make_task(task), str(tmp_path / name))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "found"), [("[{}]", "is a list"), ('{"version": 1}', "has no list `data`")])
def test_a_file_of_squad_with_another_outermost_level_is_refused(tmp_path, content: str, found: str) -> None:
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(ValueError, match=rf"squad\.json must be SQuAD's official JSON, .*, but {found}$"):
        read_examples(make_task("squad_v1"), str(tmp_path / "squad.json"))


def test_a_table_that_is_not_utf_8_is_refused_with_its_line_and_a_remedy(tmp_path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"\xef\xbb\xbf" + f"{MNLI}\n1\tcaf\xe9\tb\tneutral\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t\.tsv must be UTF-8, but line 2 has the byte 0xe9; iconv .* converts"):
        read_examples(make_task("mnli"), str(tmp_path / "t.tsv"))


def test_lines_and_folders_that_are_not_race_raise(tmp_path) -> None:
    for text, message in (
        ("{", "line 1 must be JSON"),
        ("[1]", "must be a JSON object"),
        ('{"id": "high1"}', "lacks art"),
    ):
        (tmp_path / "race.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_examples(make_task("race"), str(tmp_path / "race.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="middle/1.txt"):
        read_examples(make_task("race"), str(tmp_path / "empty"))


def squad_with(tmp_path: Path, name: str, **changes) -> str:
    data = squad_json(name, 4)
    data["data"][0]["paragraphs"][2]["qas"][0].update(changes)
    (tmp_path / "squad.json").write_text(json.dumps(data), encoding="utf-8")
    return str(tmp_path / "squad.json")


@pytest.mark.parametrize(
    "task, changes, message",
    [
        (
            "squad_v1",
            {"answers": [{"text": "zebra", "answer_start": 0}]},
            r"\[2\].qas\[0\]: an answer must occur in its",
        ),
        ("squad_v1", {"answers": []}, r"a question of SQuAD 1.1 must have an answer .*, but this has none: '"),
        ("squad_v1", {"question": " "}, "must be a non-empty text"),
        ("squad_v1", {"answers": [{"text": "zebra"}]}, r"\[2\].qas\[0\]: an answer must occur"),
        ("squad_v1", {"answers": [{"text": "a", "answer_start": "0"}]}, r"\[2\].qas\[0\]: an answer must occur"),
        ("squad_v1", {"answers": None}, r"\[2\].qas\[0\]: `answers` must be a list of objects"),
        ("squad_v1", {"id": 7}, r"\[2\].qas\[0\]: `id` must be a text, but is 7"),
        ("squad_v1", {"question": "\udfff"}, r"\[2\].qas\[0\]: a question must be a non-empty text"),
        ("squad_v2", {"is_impossible": True}, "not both, but this has both or neither: "),
    ],
)
def test_invalid_squad_questions_raise_with_their_location(tmp_path, task, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_examples(make_task(task), squad_with(tmp_path, task, **changes))


def test_the_hub_gives_the_same_examples_as_local_files(tmp_path, shared_data) -> None:
    import pandas as pd

    local = {
        name: read_examples(make_task(name), str(write_task(tmp_path, name, 9)))[0]
        for name in ("mnli", "qqp", "race", "squad_v1", "squad_v2")
    }
    order = ["entailment", "neutral", "contradiction"]
    names = ["contradiction", "entailment", "neutral"]
    tables = {
        "mnli": [
            {"premise": e.first, "hypothesis": e.second, "label": order.index(names[e.label]), "idx": int(e.id)}
            for e in local["mnli"]
        ],
        "qqp": [
            {"question1": e.first, "question2": e.second, "label": e.label, "idx": int(e.id)} for e in local["qqp"]
        ],
        "race": [
            {
                "example_id": e.id[:-2],
                "article": e.article,
                "question": e.question,
                "options": list(e.options),
                "answer": "ABCD"[e.label],
            }
            for e in local["race"]
        ],
    }
    for name in ("squad_v1", "squad_v2"):
        tables[name] = [
            {
                "id": e.id,
                "title": "t",
                "context": e.context,
                "question": e.question,
                "answers": {"text": [t for t, _ in e.answers], "answer_start": [s for _, s in e.answers]},
            }
            for e in local[name]
        ]
    for name, rows in tables.items():
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(folder / "validation.parquet")
        found, _ = read_examples(make_task(name, hub_name=str(folder)), "hub:validation")
        strip = name == "race"  # the hub numbers questions by row
        if strip:
            assert [(e.article, e.question, e.options, e.label, e.group) for e in found] == [
                (e.article, e.question, e.options, e.label, e.group) for e in local[name]
            ]
        else:
            assert found == local[name]


class Table(list):
    """Rows as `datasets` gives them, and the names of the classes of its label."""

    def __init__(self, rows: list[dict], names: list[str] | None = None) -> None:
        super().__init__(rows)
        self.column_names = list(rows[0])
        self.features = dict.fromkeys(rows[0]) | {"label": SimpleNamespace(names=names) if names else None}


NLI = {"premise": "a", "hypothesis": "b", "label": 0, "idx": 0}
PAIR = {"question1": "a", "question2": "b", "label": 0, "idx": 0}
QUESTION = {"id": "1", "title": "t", "context": "a", "question": "q", "answers": {"text": [], "answer_start": []}}


@pytest.mark.parametrize(
    "task, row, message",
    [
        ("mnli", NLI | {"label": 1.0}, "row 0: `label` must be one of contradiction, .*, 0, 1, 2, -1, but is 1.0"),
        ("mnli", NLI | {"premise": 5}, "row 0: texts must not be empty, of another type"),
        ("mnli", NLI | {"idx": None}, "`idx` must be a whole number or one line of.*, but is None"),
        ("qqp", PAIR | {"label": 1.0}, "`label` must be one of 0, 1, -1, but is 1.0"),
        ("squad_v2", QUESTION | {"answers": None}, "row 0: `answers` must have `text` and `answer_start`"),
        ("squad_v2", QUESTION | {"answers": {"text": ["a"], "answer_start": []}}, "lists of equal length"),
    ],
)
def test_invalid_rows_of_the_hub_raise(monkeypatch, task: str, row: dict, message: str) -> None:
    monkeypatch.setattr(sources, "load_hub", lambda task, place: Table([row]))
    with pytest.raises(ValueError, match=message):
        read_examples(make_task(task), "hub:train")


def test_a_test_set_of_the_hub_keeps_every_row_of_qqp(monkeypatch) -> None:
    rows = [PAIR | {"label": -1}, PAIR | {"label": -1, "question1": "", "idx": 1}]
    monkeypatch.setattr(sources, "load_hub", lambda task, place: Table(rows))
    examples, report = read_examples(make_task("qqp"), "hub:test")
    assert [(e.id, e.label) for e in examples] == [("0", None), ("1", None)]
    assert report.noted["kept"] == {"an empty text": ["row 1"]}


def test_the_classes_of_the_hub_may_have_any_order(monkeypatch) -> None:
    def labels_of(task, names, row) -> list[int]:
        rows = [row | {"label": number, "idx": number} for number in range(len(names or [0] * 3))]
        monkeypatch.setattr(sources, "load_hub", lambda task, place: Table(rows, names))
        return [example.label for example in read_examples(task, "hub:train")[0]]

    published = make_task("mnli").labels  # contradiction, entailment, neutral
    for names in (published, ["neutral", "contradiction", "entailment"]):
        assert labels_of(make_task("mnli"), names, NLI) == [published.index(name) for name in names]
    assert labels_of(make_task("mnli"), None, NLI) == [1, 2, 0]  # numbers alone: those of nyu-mll/glue
    assert labels_of(make_task("qqp"), ["duplicate", "not_duplicate"], PAIR) == [1, 0]
    assert labels_of(make_task("qqp"), ["0", "1"], PAIR) == [0, 1]
    own = {"label": "label", "first": "premise"}
    own_task = replace(make_task("mnli"), name="mine", columns=own, labels=["x", "y", "z"])
    assert labels_of(own_task, ["z", "x", "y"], NLI) == [2, 0, 1]
    assert labels_of(own_task, ["a", "b", "c"], NLI) == [0, 1, 2]  # the hub's names are others
    assert labels_of(own_task, ["y", "x"], NLI) == [1, 0]
    with pytest.raises(ValueError, match="row 2: `label` must be one of x, y, z, 0, 1, 2, -1, but is 'w'"):
        labels_of(own_task, ["y", "x", "w"], NLI)


def test_a_data_set_that_the_hub_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="`task.hub_name` must be a dataset.*nobody/nothing/validation"):
        read_examples(make_task("mnli", hub_name="nobody/nothing"), "hub:validation")


def test_the_fingerprint_of_a_path_follows_its_bytes(tmp_path) -> None:
    task = make_task("race")
    (tmp_path / "high").mkdir()
    (tmp_path / "high/1.txt").write_text("x", encoding="utf-8")
    first = fingerprint(task, str(tmp_path))
    assert fingerprint(task, str(tmp_path)) == first
    (tmp_path / "high/1.txt").write_text("y", encoding="utf-8")
    assert fingerprint(task, str(tmp_path)) != first
    level = fingerprint(task, str(tmp_path / "high"))
    (tmp_path / "high").rename(tmp_path / "middle")
    assert fingerprint(task, str(tmp_path / "middle")) != level  # the folder's name is the level
