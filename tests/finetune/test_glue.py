"""GLUE by name: its files, a head for a number, its table and its submission."""

import json
import re
import runpy
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from composed import composed
from finetune_runs import make_checkpoint, make_run, read_record, run_here
from finetuning import make_task, make_tokenizer, write_task

from lmscale.config.finetune import GLUE, FinetuneConfig, TaskConfig
from lmscale.finetune import sources
from lmscale.finetune.ensembling import ensemble
from lmscale.finetune.examples import PairExample
from lmscale.finetune.glue import TEST_ROWS, TEST_SETS, read_scores, write_submission
from lmscale.finetune.pairs import encode_pairs
from lmscale.finetune.scoring import predict_sets
from lmscale.finetune.tasks import read_examples


def task_of(name: str, *overrides: str) -> TaskConfig:
    values = composed("finetune", f"task={name}", "ckpt=x", *overrides)
    return FinetuneConfig.from_dict(values | {"run_dir": "/somewhere"}).task


@pytest.mark.parametrize(
    ("task", "dev", "train", "classes"),
    [
        ("cola", 522, 8_551, {1: 359, 0: 163}),
        ("sst2", 436, 6_919, {1: 235, 0: 201}),
        ("mrpc", 204, 3_667, {1: 140, 0: 64}),
        ("qnli", 2_732, 9_999, {0: 1_380, 1: 1_352}),
        ("rte", 139, 2_489, {1: 70, 0: 69}),
        ("stsb", 750, 5_748, None),
    ],
)
def test_the_published_files_are_read_completely(shared_data, task, dev, train, classes) -> None:
    folder = shared_data / "glue" / GLUE[task]
    examples, report = read_examples(make_task(task), str(folder / "dev.shared.tsv"))
    trained, _ = read_examples(make_task(task), str(folder / "train.shared.tsv.gz"))
    labels = [example.label for example in examples]
    assert (len(examples), len(trained), report.notes()) == (dev, train, [])
    assert examples[0].first.isprintable() and (examples[0].second is None) == (task in ("cola", "sst2"))
    if classes is not None:
        assert {label: labels.count(label) for label in set(labels)} == classes
    else:
        assert min(labels) == 0 and max(labels) == 5 and labels[0] == 5.0


TEST_FILES = {
    "cola": "index\tsentence\n0\tBill whistled past the house .",
    "sst2": "index\tsentence\n0\tuneasy mishmash of styles",
    "mrpc": "\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb",
    "stsb": "index\tgenre\tfile\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n0\tg\tf\ty\t1\t2\t\ta\tb",
    "qqp": "id\tquestion1\tquestion2\n0\ta\tb",
    "mnli": "index\tpromptID\tpairID\tgenre\ts1b\ts2b\ts1p\ts2p\tsentence1\tsentence2\n0\tx\tx\tx\tx\tx\tx\tx\ta\tb",
    "qnli": "index\tquestion\tsentence\n0\ta\tb",
    "rte": "index\tsentence1\tsentence2\n0\ta\tb",
    "wnli": "index\tsentence1\tsentence2\n0\ta\tb",
}


@pytest.mark.parametrize("task", GLUE)
def test_a_test_file_has_other_columns_and_no_labels(tmp_path, task: str) -> None:
    (tmp_path / "test.tsv").write_text(TEST_FILES[task] + "\n", encoding="utf-8")
    (example,), _ = read_examples(make_task(task), str(tmp_path / "test.tsv"))
    texts = TEST_FILES[task].splitlines()[1].split("\t")
    assert (example.id, example.label) == ("0", None)
    assert [example.first, example.second] == (texts[-2:] if len(texts) > 2 else [texts[1], None])


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        (
            "cola",
            ["gj04\t1\t\tA cat .", "gj04\t2\t\tA dog ."],
            "line 2: column 1 (from 0) must be one of 0, 1, but is '2'",
        ),
        ("cola", ["gj04\t1\t\tA cat .", ""], "line 2: a row must have 4 columns, but has 1"),
        ("cola", ["sentence\tlabel", "a\t1"], "must have the columns idx, sentence, label, but lacks idx"),
        ("cola", ["a\tb"], "dev.tsv must have at least 4 columns or a line of their names, but has 2"),
        ("sst2", ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\t1"], "lacks sentence"),
        (
            "rte",
            ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\t1"],
            "line 2: `label` must be one of entailment, not_entailment, but is '1'",
        ),
        (
            "wnli",
            ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment"],
            "line 2: `label` must be one of 0, 1, but is 'entailment'",
        ),
        (
            "stsb",
            ["index\tsentence1\tsentence2\tscore", "0\ta\tb\t5.2"],
            "line 2: `score` must be a number from 0 to 5, but is '5.2'",
        ),
        (
            "stsb",
            ["index\tsentence1\tsentence2\tscore", "0\ta\tb\tnan", "1\ta\tb\t"],
            "line 2: `score` must be a number from 0 to 5, but is 'nan'; 2 such rows: line 2, line 3",
        ),
        ("mrpc", ["Quality\t#1 ID\t#2 ID\t#1 String", "1\t1\t2\ta"], "lacks #2 String"),
        ("qnli", ["index\tquestion\tsentence\tlabel", "0\ta\tb"], "line 2: a row must have 4 columns, but has 3"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_row(tmp_path, task, lines, message) -> None:
    (tmp_path / "dev.tsv").write_text("\n".join(lines + ["x"] * (lines[-1] == "")), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_examples(make_task(task), str(tmp_path / "dev.tsv"))
    assert "dev.tsv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_of_json_that_is_too_large_is_refused(tmp_path) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text('{"index": 0, "sentence1": "a", "sentence2": "b", "score": 1' + "0" * 400 + "}")
    with pytest.raises(ValueError, match="line 1: `score` must be a number from 0 to 5, but is 1000"):
        read_examples(make_task("stsb"), str(path))


def test_an_empty_text_of_glue_is_kept_and_counted(tmp_path) -> None:
    path = tmp_path / "dev.tsv"
    path.write_text("sentence\tlabel\na\t1\n \t0\n")
    examples, report = read_examples(make_task("sst2"), str(path))
    assert len(examples) == 2 and report.notes() == ["1 row kept, an empty text: line 3"]


def test_a_folder_replaces_the_splits_of_the_hub(tmp_path) -> None:
    for name in ("RTE", "MNLI", "CoLA"):
        (tmp_path / name).mkdir()
    for name in ("RTE/train.tsv.gz", "RTE/dev.tsv", "RTE/dev.tsv.gz"):
        (tmp_path / name).touch()
    rte = task_of("rte", f"task.path={tmp_path}")
    assert (rte.train, rte.validation) == (f"{tmp_path}/RTE/train.tsv.gz", {"dev": f"{tmp_path}/RTE/dev.tsv"})
    own = task_of("rte", f"task.path={tmp_path}", "task.train=other.tsv")
    assert (own.train, own.test) == ("other.tsv", {})
    mnli = task_of("mnli", f"task.path={{mnli: {tmp_path}/MNLI, rte: elsewhere}}", "task.submit=true", "+task.test.x=y")
    names = {"test_matched": "test_matched", "test_mismatched": "test_mismatched", "ax": "diagnostic"}
    assert mnli.test == {name: f"{tmp_path}/MNLI/{file}.tsv" for name, file in names.items()} | {"x": "y"}
    assert mnli.validation["mismatched"] == f"{tmp_path}/MNLI/dev_mismatched.tsv"
    one = task_of("mnli", "task.submit=true", "task.validation.mismatched=null", "+task.validation.own=FILE")
    assert [*one.test] == ["test_matched", "test_mismatched", "ax"]  # GLUE's, whatever is validated on
    hub = task_of("stsb", "task.path={rte: elsewhere}", "task.submit=true")
    assert (hub.train, hub.test) == ("hub:train", {"test": "hub:test"})
    assert task_of("mnli", "task.submit=true").test["ax"] == "hub:ax/test"
    assert TaskConfig(**vars(mnli)).located() == mnli  # as a record builds it again


def test_the_diagnostic_set_is_in_another_subset_of_the_hub(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(sources, "load_dataset", lambda *words: asked.append(words))
    task = task_of("mnli")
    for place in ("hub:ax/test", "hub:test_matched"):
        sources.load_hub(task, place)
    assert asked == [
        ("task.hub_name", "nyu-mll/glue", "ax", "test"),
        ("task.hub_name", "nyu-mll/glue", "mnli", "test_matched"),
    ]


@pytest.fixture(scope="module")
def number_runs(tmp_path_factory) -> list[FinetuneConfig]:
    """A finetuning on numbers that learns them by heart, and one of another seed."""
    folder = tmp_path_factory.mktemp("numbers")
    ckpt = make_checkpoint(folder / "ckpt")
    # Scored on 9 of the examples that it is trained on.
    settings = {"task__train": str(write_task(folder, "stsb", 9, first=1000)), "trainer__num_epochs": 120}
    settings |= {"optimizer__lr": 3e-3, "trainer__score_every_epoch": False}
    runs = [make_run("stsb", folder, ckpt, run=f"run{seed}", seed=seed, **settings) for seed in (1, 2)]
    assert [run_here(run) for run in runs] == [0, 0]
    return runs


def test_a_number_is_learned(number_runs) -> None:
    run = number_runs[0]
    metrics, place = read_record(run)["metrics"], Path(run.run_dir) / "predictions/dev"
    outputs, labels = np.load(place / "logits.npy")[:, 0], [5 - n % 3 * 2.5 for n in range(1000, 1009)]
    assert metrics["stsb/pearson"]["value"] > 90 and metrics["stsb/spearman"]["unit"] == "correlation x 100"
    assert metrics["stsb/pearson"]["value"] == pytest.approx(100 * np.corrcoef(outputs, labels)[0, 1], rel=1e-6)
    rows = [line.split("\t") for line in (place / "STS-B.tsv").read_text().splitlines()]
    assert rows[0] == ["index", "prediction"] and [row[0] for row in rows[1:]] == [str(n) for n in range(1000, 1009)]


def predict_numbers(outputs: list[float], labels: list[float]):
    examples = [PairExample(str(n), "cat", "dog", label) for n, label in enumerate(labels)]
    features, logits = encode_pairs(make_task("stsb"), examples, make_tokenizer()), np.array(outputs)[:, None]
    predictions, metrics = predict_sets(make_task("stsb"), {"dev": features}, {"dev": list(logits)}, ["dev"])
    return predictions["dev"], metrics


def test_numbers_are_clipped_in_the_predictions_only() -> None:
    found, metrics = predict_numbers([-0.5, 1.23456789, 7.0, 2.0], [0.0, 1.0, 5.0, 2.0])
    assert list(found.answers.values()) == ["0", "1.23457", "5", "2"] and found.alarms == []
    expected = 100 * np.corrcoef([-0.5, 1.23456789, 7.0, 2.0], [0.0, 1.0, 5.0, 2.0])[0, 1]
    assert metrics == pytest.approx({"stsb/pearson": expected, "stsb/spearman": 100.0})


@pytest.mark.parametrize(
    ("outputs", "labels", "alarm"),
    [
        (
            [2.5] * 3,
            [1.0, 2.0, 5.0],
            "every example of dev is predicted as 2.5, so that stsb/pearson and stsb/spearman cannot be computed: the "
            "model has not learned the task; try more trainer.num_epochs, or another optimizer.lr",
        ),
        (
            [1.0, 2.0],
            [3.0, 3.0],
            "stsb/pearson and stsb/spearman cannot be computed: the labels of dev are all equal",
        ),
    ],
)
def test_a_correlation_that_is_undefined_is_null_with_the_reason(outputs, labels, alarm) -> None:
    found, metrics = predict_numbers(outputs, labels)
    assert found.alarms == [alarm] and all(map(np.isnan, metrics.values())) and len(metrics) == 2


def test_an_ensemble_averages_numbers(number_runs, tmp_path) -> None:
    runs = [Path(run.run_dir) for run in number_runs]
    metrics, _ = ensemble(runs, tmp_path)
    mean = np.mean([np.load(run / "predictions/dev/logits.npy")[:, 0] for run in runs], axis=0)
    labels = [5 - n % 3 * 2.5 for n in range(1000, 1009)]
    assert metrics["stsb/pearson"] == pytest.approx(100 * np.corrcoef(mean, labels)[0, 1], rel=1e-6)
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    task = json.loads((other / "predictions/dev/task.json").read_text()) | {"value_range": [0, 9]}
    (other / "predictions/dev/task.json").write_text(json.dumps(task))
    with pytest.raises(ValueError, match=r"`task.value_range` of .*, \[0, 5\], but has \[0, 9\]"):
        ensemble([runs[0], other], tmp_path)


def make_finetuning(
    folder: Path, task: str, seed: int, metrics: dict[str, float | None], predicts: bool = True
) -> Path:
    """A run folder as glue.py reads it."""
    run = folder / f"{task}_{seed}"
    run.mkdir(parents=True)
    values = composed("finetune", f"task={task}", "ckpt=x", f"seed={seed}")
    sets = {name: {"examples": 7} for name in values["task"]["validation"]}
    entries = {f"{task}/{name}": {"value": value, "unit": "%"} for name, value in metrics.items()}
    record = {"seed": seed, "metrics": entries, "config": values | {"sets": sets}}
    (run / "record.json").write_text(json.dumps(record))
    names = ["MNLI-m", "MNLI-mm", "AX"] if task == "mnli" else [GLUE.get(task)]
    for name in names if predicts else ():
        place = run / "predictions" / TEST_SETS.get(name, "test")
        place.mkdir(parents=True)
        prediction = values["task"].get("labels", ["2.5"])[0]
        rows = "".join(f"{number}\t{prediction}\n" for number in range(TEST_ROWS[name]))
        (place / f"{name}.tsv").write_text(f"index\tprediction\n{rows}")
    return run


ONE = {"accuracy": 80.0}
SCORES = {task: ONE for task in GLUE} | {
    "cola": {"matthews": 50.0},
    "mrpc": {"accuracy": 80.0, "f1": 90.0},
    "qqp": {"accuracy": 90.0, "f1": 87.0},
    "stsb": {"pearson": 89.0, "spearman": 87.0},
    "mnli": {"accuracy": 1.0, "accuracy_matched": 84.0, "accuracy_mismatched": 86.0},
}


def run_glue(folder: Path, repository: Path, capsys, monkeypatch) -> list[str]:
    """The lines that glue.py prints."""
    monkeypatch.setattr("sys.argv", ["glue.py", str(folder)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(repository / "finetune" / "glue.py"), run_name="__main__")
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def all_nine(tmp_path_factory) -> Path:
    """A run of each task, and four more of CoLA."""
    folder = tmp_path_factory.mktemp("all")
    for task, metrics in SCORES.items():
        make_finetuning(folder, task, 1, metrics)
    for seed, score in ((2, 10.0), (3, 70.0), (4, None), (5, 52.0)):
        make_finetuning(folder, "cola", seed, {"matthews": score})
    return folder


def test_the_glue_score_is_the_mean_of_nine_tasks(all_nine, repository, capsys, monkeypatch) -> None:
    lines = run_glue(all_nine, repository, capsys, monkeypatch)
    assert [line.split()[:2] for line in lines[:9]] == [
        ["CoLA", "50.00"],  # of 10, 50, 52, 70 and one that is undefined, the lowest
        ["SST-2", "80.00"],
        ["MRPC", "85.00"],
        ["STS-B", "88.00"],
        ["QQP", "88.50"],
        ["MNLI", "85.00"],
        ["QNLI", "80.00"],
        ["RTE", "80.00"],
        ["WNLI", "80.00"],
    ]
    assert lines[0].endswith("matthews 50.00, median of 5, 7 of 1,043 examples")
    assert lines[9] == f"GLUE score {(50 + 85 + 88 + 88.5 + 85 + 4 * 80) / 9:.2f}"
    assert lines[10] == f"submission: {all_nine / 'submission.zip'}, 11 of 11 files" and len(lines) == 11
    with zipfile.ZipFile(all_nine / "submission.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in TEST_ROWS)
        for name, rows in TEST_ROWS.items():
            found = archive.read(f"{name}.tsv").decode().splitlines()
            assert (len(found), found[0], found[-1].split("\t")[0]) == (rows + 1, "index\tprediction", str(rows - 1))


def test_what_is_missing_is_said(tmp_path, repository, capsys, monkeypatch) -> None:
    for task in ("rte", "stsb"):
        make_finetuning(tmp_path, task, 1, SCORES[task], predicts=task == "rte")
    make_finetuning(tmp_path, "cola", 1, {"matthews": None}, predicts=False)
    make_finetuning(tmp_path, "race", 1, ONE, predicts=False)
    lines = run_glue(tmp_path, repository, capsys, monkeypatch)
    assert lines[0].startswith("CoLA   undefined  matthews undefined, median of 1")
    assert lines[3] == "mean of 2 tasks 84.00, without CoLA, SST-2, MRPC, QQP, MNLI, QNLI, WNLI"
    assert "submission without MNLI-m.tsv: there is no run of task=mnli" in lines
    assert f"submission without STS-B.tsv: {tmp_path}/stsb_1 has not predicted it (task.submit=true)" in lines
    assert lines[-1] == f"submission: {tmp_path / 'submission.zip'}, 1 of 11 files" and len(lines) == 15
    shutil.rmtree(tmp_path / "rte_1/predictions")
    assert run_glue(tmp_path, repository, capsys, monkeypatch)[-1].startswith(
        "no submission: no median run has predict"
    )


@pytest.mark.parametrize(
    ("task", "edit", "problem"),
    [
        ("rte", lambda rows: rows[:-1], "must have 3,000 rows, as GLUE's test set, but has 2,999"),
        ("rte", lambda rows: [*rows, rows[-1]], "line 3002 must have the index 3000, but has '2999'"),
        ("rte", lambda rows: ["index\tlabel", *rows[1:]], "line 1 must be index and prediction, but is index, label"),
        (
            "rte",
            lambda rows: [rows[0], "0\t1", *rows[2:]],
            "line 2 must have one of entailment, not_entailment, but has 1",
        ),
        ("rte", lambda rows: [rows[0], *rows[2:]], "line 2 must have the index 0, but has '1'"),
        ("wnli", lambda rows: [rows[0], "0", *rows[2:]], "line 2 must have one of 0, 1, but has "),
        ("stsb", lambda rows: [rows[0], "0\t5.1", *rows[2:]], "line 2 must have a number from 0 to 5, but has 5.1"),
        ("stsb", lambda rows: [rows[0], "0\tnan", *rows[2:]], "line 2 must have a number from 0 to 5, but has nan"),
    ],
)
def test_a_file_that_glue_would_not_take_is_left_out_with_the_reason(tmp_path, task, edit, problem) -> None:
    run = make_finetuning(tmp_path, task, 1, SCORES[task])
    path = run / "predictions/test" / f"{GLUE[task]}.tsv"
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    problems = write_submission(read_scores(tmp_path), tmp_path / "submission.zip")
    assert problems[path.name] == f"{path} {problem}" and not (tmp_path / "submission.zip").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"index\tindex\n"])
def test_a_damaged_file_of_predictions_is_left_out(tmp_path, content: bytes) -> None:
    path = make_finetuning(tmp_path, "rte", 1, ONE) / "predictions/test/RTE.tsv"
    path.write_bytes(content)
    make_finetuning(tmp_path, "wnli", 1, ONE)
    problems = write_submission(read_scores(tmp_path), tmp_path / "submission.zip")
    assert problems["RTE.tsv"].startswith(f"{path} must ") and "WNLI.tsv" not in problems


def test_a_submission_stays_until_the_next_is_complete(tmp_path, monkeypatch) -> None:
    make_finetuning(tmp_path, "rte", 1, ONE)
    target = tmp_path / "submission.zip"
    target.write_bytes(b"earlier")

    def fill_disk(*args) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "write", fill_disk)
    with pytest.raises(ValueError, match="must be written to a folder with free space, but .*submission.zip: No space"):
        write_submission(read_scores(tmp_path), target)
    assert target.read_bytes() == b"earlier" and not [*tmp_path.glob("*.unfinished*"), *tmp_path.glob(".*")]


def test_the_best_setting_of_a_task_counts(tmp_path) -> None:
    for seed, score in ((1, 60.0), (2, 90.0), (3, 70.0)):
        make_finetuning(tmp_path / "a", "rte", seed, {"accuracy": score})
        run = make_finetuning(tmp_path / "b", "rte", seed, {"accuracy": score + 1})
        record = json.loads((run / "record.json").read_text())
        record["config"]["optimizer"]["lr"] = 1e-3
        (run / "record.json").write_text(json.dumps(record))
    found = read_scores(tmp_path)["rte"]
    assert (found.score, found.num_settings, found.setting.median_run) == (71.0, 2, tmp_path / "b/rte_3")


def test_another_validation_set_does_not_count(tmp_path) -> None:
    run = make_finetuning(tmp_path, "mrpc", 1, {"accuracy": 50.0, "f1": 50.0, "accuracy_dev": 80.0, "f1_dev": 90.0})
    record = json.loads((run / "record.json").read_text())
    record["config"]["task"]["validation"]["own"] = "own.tsv"
    record["config"]["sets"]["own"] = {"examples": 100}
    (run / "record.json").write_text(json.dumps(record))
    found = read_scores(tmp_path)["mrpc"]
    assert (found.score, found.num_examples) == (85.0, 7)


def test_the_score_of_two_metrics_is_the_median_of_each_runs_mean(tmp_path) -> None:
    for seed, (accuracy, f1) in enumerate([(80.0, 90.0), (82.0, 84.0), (81.0, 92.0)]):
        make_finetuning(tmp_path, "mrpc", seed, {"accuracy": accuracy, "f1": f1}, predicts=False)
    found = read_scores(tmp_path)["mrpc"]
    assert found.score == 85.0 and found.metrics == {"mrpc/accuracy": 81.0, "mrpc/f1": 90.0}  # whose mean is 85.5


def test_a_folder_without_glue_is_refused(tmp_path) -> None:
    make_finetuning(tmp_path, "race", 1, ONE, predicts=False)
    with pytest.raises(ValueError, match="must have finetunings on tasks of GLUE below it, but has race"):
        read_scores(tmp_path)
    run = make_finetuning(tmp_path, "mnli", 1, {"accuracy": 80.0, "accuracy_matched": 80.0})
    with pytest.raises(ValueError, match=f"{run} must have the metrics .*, but lacks mnli/accuracy_mismatched"):
        read_scores(tmp_path)
