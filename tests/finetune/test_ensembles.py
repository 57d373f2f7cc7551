"""Ensembles against means by hand, and their errors; medians over seeds."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from finetune_runs import make_checkpoint, make_run, read_record, run_here

from lmscale.finetune.answers import decode_answers
from lmscale.finetune.ensembling import ensemble
from lmscale.finetune.outputs import read_outputs
from lmscale.finetune.protocol import read_settings
from lmscale.results import new_record, write_record


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> dict[str, list[Path]]:
    """Two runs of a task of each kind, with different seeds."""
    folder = tmp_path_factory.mktemp("members")
    ckpt, made = make_checkpoint(folder / "ckpt"), {}
    for name in ("qqp", "race", "squad_v1"):
        runs = [make_run(name, folder, ckpt, run=f"{name}/{seed}", seed=seed) for seed in (1, 2)]
        for run in runs:
            assert run_here(run) == 0
        made[name] = [Path(run.run_dir) for run in runs]
    return made


@pytest.mark.parametrize("name", ["qqp", "race"])
def test_classes_and_choices_have_the_mean_probability(members, tmp_path, name: str) -> None:
    runs = [Path(shutil.copytree(run, tmp_path / f"member_{run.name}")) for run in members[name]]
    files = [run / "predictions/dev/logits.npy" for run in runs]
    generator = np.random.default_rng(1)
    for file in files:
        np.save(file, generator.normal(0, 5, np.load(file).shape))
    metrics, alarms = ensemble(runs, tmp_path)
    assert alarms == []
    logits = [np.load(file).astype(np.float64) for file in files]
    powers = [np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True) for rows in logits]
    chosen = np.mean(powers, axis=0).argmax(axis=1)
    if name == "race":  # of two classes both means choose the same
        assert (chosen != np.log(powers).sum(axis=0).argmax(axis=1)).any()
    features = read_outputs(runs[0] / "predictions/dev").features
    assert metrics[f"{name}/accuracy"] == pytest.approx(100 * (chosen == features.labels).mean())
    written = (tmp_path / "dev" / ("QQP.tsv" if name == "qqp" else "predictions.json")).read_text()
    answers = json.loads(written).values() if name == "race" else [r.split("\t")[1] for r in written.split("\n")[1:-1]]
    assert list(answers) == [("ABCD" if name == "race" else "01")[c] for c in chosen]


def test_spans_have_the_mean_of_the_logits(members, tmp_path) -> None:
    ensemble(members["squad_v1"], tmp_path)
    outputs = [read_outputs(run / "predictions/dev") for run in members["squad_v1"]]
    mean = [np.mean(rows, axis=0) for rows in zip(*(output.logits for output in outputs), strict=True)]
    expected = decode_answers(outputs[0].features, mean, 5, 8)
    written = json.loads((tmp_path / "dev/predictions.json").read_text())
    assert written == {name: found.text for name, found in expected.items()}


def changed(members, tmp_path, name: str, change) -> list[Path]:
    """The first member, and the second with changed outputs."""
    other = tmp_path / "changed"
    shutil.copytree(members[name][1], other)
    change(other / "predictions/dev")
    return [members[name][0], other]


def edit_json(file: str, change):
    def apply(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        change(values)
        (folder / file).write_text(json.dumps(values))

    return apply


def edit_array(file: str, change):
    def apply(folder: Path) -> None:
        array = np.load(folder / file)
        change(array)
        np.save(folder / file, array)

    return apply


IDS = "features/features.json"


def rename_a_question(values: dict) -> None:
    values["facts"]["dataset"]["data"][0]["paragraphs"][0]["qas"][0]["question"] = "another ?"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qqp", edit_json(IDS, lambda v: v["ids"].__setitem__(3, "x")), "must have the ids of .*, but has .*'x'"),
        ("qqp", edit_json(IDS, lambda v: v["ids"].pop()), "must have the number of ids of .*, 9, but has 8"),
        ("race", edit_array("features/labels.npy", lambda a: a.__setitem__(0, (a[0] + 1) % 4)), "must have the labels"),
        (
            "squad_v1",
            edit_array("features/offsets.npy", lambda a: a.__setitem__((5, 0), 99)),
            "must have the labels and windows",
        ),
        (
            "race",
            edit_json("task.json", lambda v: v.update(name="mnli", columns={"first": "a"}, labels=["a", "b"])),
            "must have the task of .*, race, but has mnli",
        ),
        ("squad_v1", edit_json(IDS, rename_a_question), "must have the questions of .*others"),
        (
            "squad_v1",
            edit_json("task.json", lambda v: v.__setitem__("num_best", 1)),
            "`task.num_best` of .*5, but has 1",
        ),
        (
            "squad_v1",
            edit_json("task.json", lambda v: v.__setitem__("null_threshold", 0.5)),
            "`task.null_threshold` of .*None, but has 0.5",
        ),
        (
            "qqp",
            edit_json("task.json", lambda v: v.__setitem__("validation", {})),
            r"validation sets .*, \['dev'\], but has \[\]",
        ),
        ("qqp", lambda f: np.save(f / "logits.npy", np.zeros((8, 2))), r"must be of shape \(9,\), but is of \(8,\)"),
        ("squad_v1", lambda f: np.save(f / "logits.npy", np.zeros((2, 5))), r"must be of shape \(2, \d+\), but"),
        ("race", lambda folder: (folder / "logits.npy").write_bytes(b""), "must hold the outputs of a finetuning"),
        ("race", lambda folder: (folder / IDS).write_text("[1]"), "must hold the outputs of a finetuning"),
        ("race", lambda folder: folder.rename(folder.with_name("other")), "must have the sets of .*dev, but has other"),
    ],
)
def test_members_with_other_items_raise(members, tmp_path, name, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble(changed(members, tmp_path, name, change), tmp_path / "out")


def test_members_that_number_the_classes_differently_raise(members, tmp_path) -> None:
    columns, runs = {"id": None, "first": "text", "second": None, "label": "class"}, []
    for run, labels in zip(members["qqp"], (["bad", "good"], ["good", "bad"]), strict=True):
        runs.append(shutil.copytree(run, tmp_path / labels[0]))
        own = {"name": "mine", "columns": columns, "labels": labels}
        edit_json("task.json", lambda values, own=own: values.update(own))(runs[-1] / "predictions/dev")
    with pytest.raises(ValueError, match=r"`task.labels` of .*\['bad', 'good'\], but has \['good', 'bad'\]"):
        ensemble(runs, tmp_path / "out")


def test_an_ensemble_needs_two_completed_runs(members, tmp_path) -> None:
    first = members["qqp"][0]
    for runs in ([first], [first, first], [first, first / ".." / first.name]):
        with pytest.raises(ValueError, match="at least two runs, each once"):
            ensemble(runs, tmp_path / "out")
    with pytest.raises(ValueError, match="has no predictions"):
        ensemble([first, tmp_path], tmp_path / "out")


def test_an_ensemble_is_a_run_only_if_all_its_members_are(tmp_path, repository) -> None:
    evidence = runpy.run_path(str(repository / "finetune" / "ensemble.py"))["evidence"]
    for name, kind, size in (("a", "run", "336M"), ("b", "run", "336M"), ("c", "scaled_down", "336M"), ("d", "run", 0)):
        record = new_record(name, kind, config={"paper_size": size}, seed=1, metrics={}, device="cpu")
        write_record(record, tmp_path / name / "record.json")
    for last, expected in (("b", "run"), ("c", "scaled_down"), ("d", "scaled_down")):
        assert evidence([tmp_path / "a", tmp_path / last])[0] == expected


def test_an_ensemble_that_never_answers_warns(tmp_path_factory, tmp_path) -> None:
    folder = tmp_path_factory.mktemp("nulls")
    # "No answer" wins where it is at most 9 below the best answer: always, here.
    run = make_run("squad_v2", folder, make_checkpoint(folder / "ckpt"), task__null_threshold=-9.0)
    assert run_here(run) == 0
    (alarm,) = read_record(run)["config"]["sets"]["dev"]["alarms"]
    assert "never answers" in alarm
    twin = shutil.copytree(run.run_dir, folder / "twin")
    _, alarms = ensemble([Path(run.run_dir), twin], tmp_path)
    assert len(alarms) == 1 and "never answers" in alarms[0]


def record(folder: Path, seed: int, accuracy: float, **config) -> None:
    values = {
        "task": {"name": "qqp", "validation": {}},
        "seed": seed,
        "run_dir": str(folder),
        "optimizer": {"lr": 1e-5},
    } | config
    folder.mkdir(parents=True)
    text = json.dumps({"seed": seed, "metrics": {"qqp/accuracy": {"value": accuracy}}, "config": values})
    (folder / "record.json").write_text(text)


def test_the_median_of_five_seeds_names_its_run(tmp_path) -> None:
    for seed, accuracy in zip((1, 2, 3, 4, 5), (80.0, 91.0, 85.0, 84.0, 99.0), strict=True):
        record(tmp_path / str(seed), seed, accuracy)
    (setting,) = read_settings(tmp_path)
    assert setting.median == 85.0 and setting.median_run == tmp_path / "3" and setting.differing == {}


def test_seeds_at_different_layouts_are_one_setting(tmp_path) -> None:
    for seed, tp_size, micro_batch_size in ((1, 1, 8), (2, 2, 8), (3, 2, 4)):
        layout = {"parallel": {"tp_size": tp_size}, "micro_batch_size": micro_batch_size}
        layout["trainer"] = {"save": seed == 1, "log_every_steps": seed, "num_threads": None if seed == 2 else 1}
        record(tmp_path / str(seed), seed, 80.0 + seed, **layout)
    (setting,) = read_settings(tmp_path)
    assert setting.median == 82.0 and setting.differing == {}
    record(tmp_path / "again", 2, 90.0, parallel={"tp_size": 1}, micro_batch_size=8)
    with pytest.raises(ValueError, match="must differ in their seed"):
        read_settings(tmp_path)


def test_sets_that_are_only_predicted_are_no_setting(tmp_path) -> None:
    for seed, changes in ((1, {}), (2, {"submit": True, "test": {"test": "hub:test"}})):
        record(tmp_path / str(seed), seed, 80.0, task={"name": "qqp", "validation": {}, "test": {}} | changes)
    (setting,) = read_settings(tmp_path)
    assert len(setting.scores) == 2 and setting.differing == {}


def test_a_search_is_sorted_by_the_median_of_each_setting(tmp_path) -> None:
    for lr, scores in ((1e-5, (70.0, 90.0, 71.0)), (3e-5, (80.0, 60.0, 81.0)), (5e-5, (75.0, 10.0, 20.0))):
        for seed, accuracy in enumerate(scores):
            record(tmp_path / f"{lr}_{seed}", seed, accuracy, optimizer={"lr": lr})
    settings = read_settings(tmp_path)
    assert [(s.differing["optimizer.lr"], s.median) for s in settings] == [(3e-5, 80.0), (1e-5, 71.0), (5e-5, 20.0)]


def test_an_undefined_score_is_the_lowest(tmp_path, repository, capsys, monkeypatch) -> None:
    for seed, accuracy in ((1, 80.0), (2, None), (3, 70.0)):
        record(tmp_path / str(seed), seed, accuracy)
    monkeypatch.setattr("sys.argv", ["median.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(repository / "finetune" / "median.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("70.00  one setting  of 3: undefined, 70.00, 80.00  median: ")


def test_runs_of_different_tasks_or_equal_seeds_raise(tmp_path) -> None:
    with pytest.raises(ValueError, match="must have records of finetunings"):
        read_settings(tmp_path)
    record(tmp_path / "a", 1, 80.0)
    record(tmp_path / "b", 1, 81.0)
    with pytest.raises(ValueError, match="must differ in their seed"):
        read_settings(tmp_path)
    with pytest.raises(ValueError, match="must have the metric qqp/f1 and a seed, but has qqp/accuracy"):
        read_settings(tmp_path, "qqp/f1")
    record(tmp_path / "c", 2, 80.0, task={"name": "race", "validation": {}})
    with pytest.raises(ValueError, match="must be of one task, but are of qqp, race"):
        read_settings(tmp_path)


def test_other_records_are_ignored_and_broken_ones_named(tmp_path) -> None:
    for seed, accuracy in ((1, 80.0), (2, 85.0), (3, 85.0), (4, 90.0)):
        record(tmp_path / str(seed), seed, accuracy)
    record(tmp_path / "lm", 1, 80.0, task={"name": "wikitext103"})
    record(tmp_path / "other", 1, 80.0, task="lambada")
    record(tmp_path / "another", 1, 80.0, task={"name": ["qqp"], "validation": {}})
    (setting,) = read_settings(tmp_path)
    # Of an even number the mean of the two in the middle, and the run of the lower one; equal ones by their folder.
    assert setting.median == 85.0 and setting.median_run == tmp_path / "2"
    (tmp_path / "1/record.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"1/record.json must be a record, but is \[1\]"):
        read_settings(tmp_path)
    for metric in ("80", {"unit": "%"}, {"value": "80"}):
        damaged = {"metrics": {"qqp/accuracy": metric}, "config": {"task": {"name": "qqp", "validation": {}}}}
        (tmp_path / "1/record.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="1/record.json must have numbers as metrics and sizes of sets, but has"):
            read_settings(tmp_path)
    (tmp_path / "1/record.json").write_text('{"config": {"task": {"name": "qqp", "validation": {}}}}')
    with pytest.raises(ValueError, match="must have the metric qqp/accuracy and a seed, but has no seed"):
        read_settings(tmp_path)


def test_records_of_real_runs_are_one_setting(members) -> None:
    (setting,) = read_settings(members["race"][0].parent)
    assert len(setting.scores) == 2 and setting.differing == {}


@pytest.mark.parametrize("name", ["config.json", ".lock"])
def test_a_run_folder_is_no_place_for_an_ensemble(repository, tmp_path, name: str) -> None:
    refuse_run_folder = runpy.run_path(str(repository / "finetune" / "ensemble.py"))["refuse_run_folder"]
    refuse_run_folder(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match="`--out` must be a folder without a run, but"):
        refuse_run_folder(tmp_path)
