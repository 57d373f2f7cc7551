"""Complete finetunings of tiny checkpoints: memorization, equality at every layout, and errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from finetune_runs import (
    make_checkpoint,
    make_run,
    read_logits,
    read_metrics,
    read_record,
    read_rows,
    run_finetunings,
    run_here,
)

from lmscale.checkpoint import Checkpoint, latest_checkpoint
from lmscale.config.finetune import FinetuneConfig, objective_of
from lmscale.finetune.preparing import check_values, is_finished, prepare_job
from lmscale.finetune.squad_score import score
from lmscale.trained_model import describe_checkpoint

OF_EVERY_RUN = {"steps", "num_updates", "num_skipped", "train_time", "train_cpu_time", "items_per_s"}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    """A checkpoint written at two tensor ranks."""
    return make_checkpoint(tmp_path_factory.mktemp("ckpt"), tp_size=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, ckpt) -> dict[str, FinetuneConfig]:
    """A finished run of every task; MNLI scores two sets, QQP a set without labels too."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    unlabelled = folder / "test.tsv"
    unlabelled.write_text("id\tquestion1\tquestion2\n7\tcat\tdog\n8\tfox\towl\n")
    changes = {
        "mnli": {},
        "qqp": {"trainer__num_epochs": 2, "task__test": {"final": str(unlabelled)}},
        "race": {"trainer__save": True},
        "squad_v1": {},
        "squad_v2": {"trainer__num_epochs": 2},
    }
    for name, settings in changes.items():
        run = make_run(name, folder, ckpt, run=name, **settings)
        if name == "mnli":
            sets = {"matched": run.task.validation["dev"], "mismatched": run.task.train}
            run = make_run(name, folder, ckpt, run=name, task__validation=sets)
        assert run_here(run) == 0
        made[name] = run
    return made


@pytest.mark.parametrize(
    "name, num_epochs, lr",
    [
        ("qqp", 50, 2e-3),
        pytest.param("mnli", 60, 2e-3, marks=pytest.mark.slow),
        pytest.param("race", 100, 1.5e-3, marks=pytest.mark.slow),
        pytest.param("squad_v1", 70, 2e-3, marks=pytest.mark.slow),
        pytest.param("squad_v2", 70, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_32_examples_are_learned_by_heart(tmp_path, ckpt, name: str, num_epochs: int, lr: float) -> None:
    trainer = {"trainer__num_epochs": num_epochs, "trainer__score_every_epoch": False}
    settings = {"count": 32, "precision__dtype": "fp32", "optimizer__lr": lr, "micro_batch_size": 8} | trainer
    train = make_run(name, tmp_path, ckpt, **settings).task.train
    run = make_run(name, tmp_path, ckpt, task__validation={"dev": train}, **settings)
    assert run_here(run) == 0
    assert read_metrics(run)[objective_of(run.to_dict()["task"])] == 100.0
    assert read_rows(run)[0]["train/loss"] > 0.6


def test_a_checkpoint_has_its_scores_where_only_the_end_is_scored(tmp_path, ckpt) -> None:
    saved = {"trainer__save": True, "trainer__num_epochs": 2, "trainer__score_every_epoch": False}
    run = make_run("squad_v2", tmp_path, ckpt, precision__dtype="fp32", **saved)
    assert run_here(run) == 0
    found = Checkpoint.open(latest_checkpoint(run.run_dir)).metadata.state["finetune"]["metrics"]
    assert "squad_v2/null_threshold" in found
    assert found.keys() == read_metrics(run).keys() - OF_EVERY_RUN
    assert found["squad_v2/f1"] == read_metrics(run)["squad_v2/f1"]
    assert len((Path(run.run_dir) / "scores.jsonl").read_text().splitlines()) == 1


def test_a_finetuning_that_learns_nothing_says_so(tmp_path, ckpt, capsys) -> None:
    run = make_run("qqp", tmp_path, ckpt, precision__dtype="fp32", optimizer__lr=3.0, trainer__num_epochs=3)
    assert run_here(run) == 0
    out, err = capsys.readouterr()
    assert out.count("WARNING: every example of dev is predicted as ") >= 2  # at each of three epochs but the first
    assert "WARNING: the training loss ended above its start, so nothing useful was learned; try a lower" in err
    assert read_record(run)["ended_above_start"]


def test_weights_are_read_on_the_cpu_whatever_the_default_device(tmp_path, ckpt, built_elsewhere) -> None:
    """The checkpoint is in fp64, so every tensor needs another buffer."""
    run = make_run("qqp", tmp_path, ckpt, precision__dtype="fp32", trainer__save=True)
    assert run_here(run) == 0
    scored = make_run("qqp", tmp_path, Path(run.run_dir), run="scored", trainer__num_epochs=0, trainer__save=True)
    assert run_here(scored) == 0 and read_metrics(scored)["qqp/accuracy"] == read_metrics(run)["qqp/accuracy"]
    assert is_finished(run) and is_finished(scored)  # which has no checkpoint
    Path(run.task.train).unlink()
    check_values(run.to_dict())  # as a job of a stopped sweep, which will do nothing


def test_losses_and_scores_do_not_depend_on_the_layout(tmp_path, ckpt) -> None:
    layouts = {"here": {}, "tp": {"parallel__tp_size": 2}}
    layouts["dp"] = {"parallel__dp_size": 2, "micro_batch_size": 8, "trainer__scoring_batch_size": 64}
    # 17 examples in batches of 8: the last step has one, which leaves a data rank with none.
    runs = {
        (name, layout): make_run(
            name,
            tmp_path,
            ckpt,
            run=f"{name}_{layout}",
            trainer__max_train_examples=17,
            hidden_dropout=0.1,  # not in the attention, whose mask depends on the length of the batch
            **changes,
        )
        for name, some in (("mnli", ("here", "tp", "dp")), ("race", ("here", "tp")), ("squad_v1", ("here", "dp")))
        for layout, changes in layouts.items()
        if layout in some
    }
    for (_, layout), run in runs.items():
        if layout == "here":
            assert run_here(run) == 0
    run_finetunings([run for (_, layout), run in runs.items() if layout != "here"], 2)
    for (name, layout), run in runs.items():
        plain = runs[name, "here"]
        rows, expected = read_rows(run), read_rows(plain)
        assert len(rows) == len(expected) == 3
        for key in ("train/loss", "grad_norm", "lr"):
            found = np.array([row[key] for row in rows])
            assert np.abs(found - [row[key] for row in expected]).max() < 1e-12, (name, layout, key)
        assert np.abs(read_logits(run) - read_logits(plain))[np.isfinite(read_logits(plain))].max() < 1e-6
        same = {k: v for k, v in read_metrics(run).items() if k.startswith(name)}
        assert same == {k: v for k, v in read_metrics(plain).items() if k.startswith(name)}


@pytest.mark.parametrize("dtype, bound", [("fp64", 1e-12), pytest.param("bf16", 2e-2, marks=pytest.mark.slow)])
def test_heads_that_tp_size_does_not_divide_change_nothing(tmp_path, dtype: str, bound: float) -> None:
    """In bf16 the masters are read too."""
    ckpt = make_checkpoint(tmp_path / "ckpt", hidden_size=24, num_attention_heads=3)
    padded = {"parallel__tp_size": 2, "parallel__pad_heads": True}
    here, split = (
        make_run("mnli", tmp_path, ckpt, run=name, precision__dtype=dtype, **changes)
        for name, changes in (("here", {}), ("padded", padded))
    )
    assert run_here(here) == 0
    run_finetunings([split], 2)
    for row, expected in zip(read_rows(split), read_rows(here), strict=True):
        assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=bound)


def test_a_run_writes_predictions_scores_and_a_record(runs) -> None:
    run = runs["squad_v2"]
    folder = Path(run.run_dir)
    answers = json.loads((folder / "predictions/dev/predictions.json").read_text())
    dataset = json.loads(Path(run.task.validation["dev"]).read_text())
    odds = json.loads((folder / "predictions/dev/null_odds.json").read_text())
    metrics = read_metrics(run)
    assert set(answers) == set(odds) == {f"q{n}" for n in range(1000, 1009)}
    scores = score(dataset, answers)
    assert metrics["squad_v2/f1"] == scores["f1"] and metrics["squad_v2/HasAns_f1"] == scores["HasAns_f1"]
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1.0, 2.0]
    record = read_record(run)
    assert record["seed"] == 1234 and record["metrics"]["squad_v2/f1"]["unit"] == "%"
    assert record["config"]["sets"]["dev"]["examples"] == 9
    assert record["metrics"]["items_per_s"]["value"] > 0


def test_training_time_is_the_time_of_its_steps(runs) -> None:
    steps, metrics = sum(row["time/step_s"] for row in read_rows(runs["qqp"])), read_metrics(runs["qqp"])
    assert steps <= metrics["train_time"] < 2 * steps + 1  # without scoring between the epochs
    assert 0 < metrics["train_cpu_time"] <= 1.1 * metrics["train_time"]  # one thread


@pytest.mark.parametrize("name", ["mnli", "race", "squad_v2"])
def test_an_objective_is_known_before_the_run(tmp_path, runs, name: str) -> None:
    names = sorted(set(read_metrics(runs[name])) - OF_EVERY_RUN)
    values = runs[name].to_dict() | {"objective": "nothing", "run_dir": str(tmp_path / "other")}
    with pytest.raises(ValueError, match="`objective` must be one of .*, but is 'nothing'") as raised:
        prepare_job(FinetuneConfig.from_dict(values))
    assert sorted(str(raised.value).partition("one of ")[2].partition(", but")[0].split(", ")) == names


@pytest.mark.parametrize(
    "name, file, labels",
    [
        ("mnli", "matched/MNLI-m.tsv", {"entailment", "neutral", "contradiction"}),
        ("mnli", "mismatched/MNLI-mm.tsv", {"entailment", "neutral", "contradiction"}),
        ("qqp", "dev/QQP.tsv", {"0", "1"}),
        ("qqp", "final/QQP.tsv", {"0", "1"}),
    ],
)
def test_predictions_have_the_benchmarks_format(runs, name: str, file: str, labels: set[str]) -> None:
    header, *rows = (Path(runs[name].run_dir) / "predictions" / file).read_text().splitlines()
    numbers = {"mismatched": range(22), "final": (7, 8)}.get(file.partition("/")[0], range(1000, 1009))
    assert header == "index\tprediction" and [row.split("\t")[0] for row in rows] == [str(n) for n in numbers]
    assert {row.split("\t")[1] for row in rows} <= labels
    assert not any("final" in metric for metric in read_metrics(runs[name]))  # it has no labels


def test_scoring_a_finetuned_checkpoint_reproduces_its_scores(tmp_path, runs) -> None:
    trained = runs["race"]
    with pytest.raises(ValueError, match="`teacher.path` must be a pretrained model, but .* is finetuned"):
        describe_checkpoint(trained.run_dir, "teacher.path")
    again = make_run("race", tmp_path, Path(trained.run_dir), run="again", trainer__num_epochs=0)
    assert run_here(again) == 0
    assert np.array_equal(read_logits(again), read_logits(trained))
    assert read_metrics(again)["race/accuracy"] == read_metrics(trained)["race/accuracy"]
    assert {"race/accuracy_middle", "race/accuracy_high"} <= read_metrics(again).keys()
    answers = json.loads((Path(again.run_dir) / "predictions/dev/predictions.json").read_text())
    assert list(answers) == [f"{('middle', 'high')[n % 2]}{n}.txt-0" for n in range(1000, 1009)]
    assert set(answers.values()) <= set("ABCD")


def test_mnli_has_its_two_sets_and_both_together(runs) -> None:
    metrics = read_metrics(runs["mnli"])
    matched, mismatched = metrics["mnli/accuracy_matched"], metrics["mnli/accuracy_mismatched"]
    assert metrics["mnli/accuracy"] == pytest.approx((9 * matched + 22 * mismatched) / 31)


def test_the_run_is_a_function_of_the_seed(tmp_path, ckpt) -> None:
    changes = {"count": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    runs = [make_run("qqp", tmp_path, ckpt, run=f"{i}", seed=seed, **changes) for i, seed in enumerate((1, 1, 2))]
    for run in runs:
        assert run_here(run) == 0
    logits = [read_logits(run) for run in runs]
    assert np.array_equal(logits[0], logits[1]) and not np.array_equal(logits[0], logits[2])


def test_data_ranks_can_shard_the_optimizer_state(tmp_path, ckpt) -> None:
    """In bf16 each rank reads the exact weights of the parameters it owns alone."""
    settings = {"precision__dtype": "bf16", "parallel__dp_size": 2, "micro_batch_size": 4}
    runs = [make_run("qqp", tmp_path, ckpt, run=str(z), parallel__zero1=z, **settings) for z in (False, True)]
    run_finetunings(runs, 2)
    plain, cut = (read_rows(run) for run in runs)
    assert [row["train/loss"] for row in cut] == pytest.approx([row["train/loss"] for row in plain], rel=1e-6)
    assert read_metrics(runs[0])["qqp/accuracy"] == read_metrics(runs[1])["qqp/accuracy"]
    exact = make_run("qqp", tmp_path, ckpt, run="exact")
    assert run_here(exact) == 0
    losses = [row["train/loss"] for row in read_rows(exact)]
    assert losses == pytest.approx([row["train/loss"] for row in plain], abs=0.02)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task__max_seq_length": 49}, "max_seq_length` must be at most the 48 positions"),
        ({"parallel__tp_size": 3}, "must be a multiple of `tp_size`"),
        ({"parallel__batch_halves": True}, "`parallel.batch_halves` must be false for a finetuning, but is true"),
        ({"parallel__pp_size": 2}, "`parallel.pp_size` must be 1 outside src/train.py, which reads"),
        ({"new_pooler": True}, "`new_pooler` must be false if the checkpoint has a trained pooler"),
        ({"trainer__num_epochs": 0}, "must have been finetuned on qqp .* not finetuned"),
        ({"task__validation": {"dev": "/nowhere.tsv"}}, "`task.validation.dev` must be a file"),
        ({"task__train": None}, "`task.train` must be given"),
        ({"task__validation": {"dev": None}}, "must have a set to score"),
        ({"task__validation": {"dev": None}, "task__test": {"x": "y"}}, "`task.validation` must have a set"),
    ],
)
def test_invalid_configurations_raise_one_line(tmp_path, ckpt, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_job(make_run("qqp", tmp_path, ckpt, **changes))


def test_unsuitable_checkpoints_raise(tmp_path) -> None:
    gpt = make_checkpoint(tmp_path / "gpt", family="gpt")
    with pytest.raises(ValueError, match="`ckpt` must be of a BERT, but .* of a gpt"):
        prepare_job(make_run("qqp", tmp_path, gpt))
    bare = make_checkpoint(tmp_path / "bare", without="pooler")
    with pytest.raises(ValueError, match="must have a trained pooler .* new_pooler=true"):
        prepare_job(make_run("qqp", tmp_path, bare))
    assert run_here(make_run("qqp", tmp_path, bare, new_pooler=True)) == 0
    assert run_here(make_run("squad_v1", tmp_path, bare, run="squad")) == 0
    with pytest.raises(ValueError, match="does not exist"):
        prepare_job(make_run("qqp", tmp_path, tmp_path / "nothing", run="none"))
    with pytest.raises(ValueError, match="`hydra.run.dir` must be a folder without the record of another run"):
        prepare_job(make_run("qqp", tmp_path, bare, new_pooler=True))


def test_another_tokenizer_raises(tmp_path, ckpt, shared_data) -> None:
    other = str(shared_data / "bert-uncased")
    with pytest.raises(ValueError, match="`tokenizer.path` must be that of the checkpoint"):
        prepare_job(make_run("qqp", tmp_path, ckpt, tokenizer__path=other))
    lonely = make_checkpoint(tmp_path / "lonely")
    (lonely / "tokenizer").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="`tokenizer.path` must be given"):
        prepare_job(make_run("qqp", tmp_path, lonely))
    with pytest.raises(ValueError, match="the tokenizer must be that of the checkpoint, whose model has"):
        prepare_job(make_run("qqp", tmp_path, lonely, tokenizer__path=other))
    assert prepare_job(make_run("qqp", tmp_path, lonely, tokenizer__path=str(tmp_path / "moved")))


def test_sets_to_train_or_choose_on_need_labels(tmp_path, ckpt) -> None:
    unlabelled = tmp_path / "test.tsv"
    unlabelled.write_text("id\tquestion1\tquestion2\n7\tcat\tdog\n8\tfox\towl\n")
    for key in ("task__train", "task__validation"):
        value = str(unlabelled) if key == "task__train" else {"dev": str(unlabelled)}
        with pytest.raises(ValueError, match="must have a label for every example"):
            prepare_job(make_run("qqp", tmp_path, ckpt, **{key: value}))
    own = {"task__name": "mine", "task__labels": ["0", "1"], "task__validation": {"dev": str(unlabelled)}}
    own["task__columns"] = {"id": "id", "first": "question1", "second": "question2", "label": "is_duplicate"}
    with pytest.raises(ValueError, match="label for every example, in the column is_duplicate, but .*tsv has none"):
        prepare_job(make_run("qqp", tmp_path, ckpt, **own))
