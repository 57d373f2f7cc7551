"""Run folders as a table, best first within each validation set, and curves; the committed demo has learned."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from analysis.demo.demo import COMMITTED, MARGIN_NATS, TITLES
from analysis.report import your_runs
from analysis.report.your_runs import NEWEST, demo_runs, draw_runs, find_runs, read_run, tabulate
from lmscale.results import new_record, write_record


def validated(family: str) -> dict:
    """The part of a configuration that names the validation set."""
    corpus = {"tokenizer": "t", "validation": {"tokens": 640, "sha256": family}}
    return {"model": {"architecture": family}, "data": {"seq_length": 32}, "corpus": corpus}


def make_run(folder: Path, loss: float, *overrides: str, family: str = "gpt") -> Path:
    metrics = {"val/loss": {"value": loss, "unit": "nats/token"}, "tokens_per_s": {"value": 90.0, "unit": "tokens/s"}}
    metrics["steps"] = {"value": 4, "unit": "steps"}
    config = validated(family) | {"overrides": list(overrides)}
    write_record(new_record(family, "run", config, 1, metrics), folder / "record.json")
    rows = [f"{step},{9 - step},{'' if step % 2 else loss},80.5" for step in range(1, 5)]
    (folder / "metrics.csv").write_text("\n".join(["step,train/loss,val/loss,tokens_per_s", *rows]) + "\n")
    return folder


def labels(table) -> list[str]:
    return list(table.index.get_level_values("run"))


def test_runs_of_a_sweep_are_named_by_what_differs_and_the_best_is_first(tmp_path) -> None:
    for i, (loss, rate) in enumerate([(5.0, "1e-3"), (4.0, "2e-3")]):
        make_run(tmp_path / "sweep" / str(i), loss, "model=gpt_tiny", f"optimizer.lr={rate}", f"hydra.run.dir={i}")
    runs, left_out = find_runs([tmp_path / "sweep"])
    table, curves = tabulate(runs)
    assert labels(table) == ["optimizer.lr=2e-3", "optimizer.lr=1e-3"] and left_out == []
    assert list(table["validation loss"]) == [4.0, 5.0] and list(table["tokens/s, last row"]) == [90.0, 90.0]
    figure = draw_runs(table, curves)
    assert figure.get_suptitle() == "Lowest validation loss: 4.000 nats/token, optimizer.lr=2e-3"
    points = [list(line.get_ydata()) for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert points == [[4.0, 4.0], [5.0, 5.0]]


def test_the_figure_of_a_short_run_shows_validation_before_and_after_it(tmp_path, monkeypatch, capsys) -> None:
    metrics = {
        name: {"value": loss, "unit": "nats"}
        for name, loss in (("val_start/loss", 9.0), ("val/loss", 6.0), ("steps", 2))
    }
    write_record(new_record("bert", "run", validated("bert") | {"overrides": []}, 1, metrics), tmp_path / "record.json")
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss,tokens_per_s\n1,8.5,,70.5\n2,7.5,6.0,80.5\n")
    training, validation = draw_runs(*tabulate([read_run(tmp_path)])).axes[0].lines
    assert [list(validation.get_xdata()), list(validation.get_ydata())] == [[0, 2], [9.0, 6.0]]
    assert validation.get_linestyle() == "None"  # a line through two points is no curve
    assert list(training.get_ydata())[1:] == [8.5, 7.5]
    monkeypatch.setattr(sys, "argv", ["your_runs.py", str(tmp_path), "--output", str(tmp_path / "curves.png")])
    assert your_runs.main() == 0 and (tmp_path / "curves.png").stat().st_size > 10_000
    assert capsys.readouterr().out.endswith(f"figure: {tmp_path / 'curves.png'}\n")
    monkeypatch.setattr(sys, "argv", ["your_runs.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        your_runs.main()
    assert capsys.readouterr().err.endswith(f"must exist, but {tmp_path}/none does not\n")


def test_the_lines_are_the_recorded_losses() -> None:
    """A mean over rows would not be: the demo's record has a row every 50 steps."""
    record = json.loads(COMMITTED.read_text())["config"]
    table, curves = demo_runs()
    drawn = {name: axis.lines[0] for name, axis in zip(labels(table), draw_runs(table, curves).axes[::2], strict=True)}
    for model, title in record["titles"].items():
        line = drawn[title.rpartition(", ")[0]]
        assert list(line.get_ydata()) == [row["train"] for row in record["curves"][model]]


def test_losses_of_two_families_are_ranked_and_drawn_apart(tmp_path) -> None:
    for name, family, loss in (("a", "gpt", 4.0), ("b", "bert", 3.0), ("c", "gpt", 3.5)):
        make_run(tmp_path / name, loss, family=family)
    table, curves = tabulate(find_runs([tmp_path])[0])
    assert labels(table) == ["b", "c", "a"]
    figure = draw_runs(table, curves)
    assert figure.get_suptitle() == "Lowest validation loss: 3.000 nats/token, b; 3.500 nats/token, c"
    assert [len(axis.lines) for axis in figure.axes[::2]] == [2, 4]  # a line and points per run


def test_runs_of_other_kinds_and_damaged_folders_are_left_out_with_the_reason(tmp_path, monkeypatch, capsys) -> None:
    make_run(tmp_path / "good", 4.0)
    for name in ("finetuned", "torn", "empty", "a_folder", "unfinished", "without_metrics"):
        make_run(tmp_path / name, 4.0)
    score = {"qqp/accuracy": {"value": 50.0, "unit": "%"}}
    record = new_record("finetune_qqp", "run", {"overrides": []}, 1, score)
    write_record(record, tmp_path / "finetuned" / "record.json")
    (tmp_path / "torn" / "record.json").write_text('{"metrics": ')
    (tmp_path / "empty" / "metrics.csv").write_text("")
    for name in ("a_folder", "unfinished"):
        (tmp_path / name / "record.json").unlink()
    (tmp_path / "a_folder" / "record.json").mkdir()
    (tmp_path / "without_metrics" / "metrics.csv").unlink()
    runs, left_out = find_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    first, *left_out = left_out
    assert first.startswith(f"left out: {tmp_path}/a_folder: ") and "must be a record, but fails with" in first
    assert "Is a directory" in first
    assert [line.removeprefix(f"left out: {tmp_path}/")[:45] for line in left_out] == [
        "empty: its metrics.csv is damaged (EmptyDataError: No columns to parse from file)"[:45],
        "finetuned: it is not a pretraining run (finet",
        f"torn: {tmp_path}/torn/record.json must"[:45],
        "unfinished: it has not finished: it has no record.json; resume=auto continues a pretraining"[:45],
        "without_metrics: it has no metrics.csv",
    ]
    monkeypatch.setattr(sys, "argv", ["your_runs.py", str(tmp_path), "--output", str(tmp_path / "curves.png")])
    assert your_runs.main() == 0 and capsys.readouterr().out.count("left out: ") == 6
    monkeypatch.setattr(sys, "argv", ["your_runs.py", str(tmp_path / "finetuned")])
    with pytest.raises(SystemExit, match="2"):
        your_runs.main()
    assert "error: `runs` must have a pretraining run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("train/loss,val/loss\n9,4\n", "KeyError: 'step'"),
        ("step,train/loss\n1,9\n,8\n", "ValueError: it must have the step of every row and a training loss"),
        ("step,train/loss\n2,9\n1,8\n", "ValueError: its steps must increase"),
        ("step,train/loss\n1,9\n4,7.5", "ValueError: its last row is cut off"),
        ("step,train/loss\n1,9,7\n2,8,7\n", "ValueError: its rows have more fields than its header"),
        ("step,train/loss\n1,9\n3,7.5\n", "ValueError: it must end at step 4, the run's last, but ends at 3"),
    ],
)
def test_a_table_of_metrics_without_what_is_drawn_is_left_out(tmp_path, text: str, reason: str) -> None:
    (make_run(tmp_path / "bad", 4.0) / "metrics.csv").write_text(text)
    assert find_runs([tmp_path]) == ([], [f"left out: {tmp_path}/bad: its metrics.csv is damaged ({reason})"])


def test_a_run_without_a_finite_validation_loss_is_last_and_drawn(tmp_path) -> None:
    make_run(tmp_path / "good", 4.0)
    make_run(tmp_path / "bad", math.nan)
    table, curves = tabulate(find_runs([tmp_path])[0])
    assert labels(table) == ["good", "bad"] and len(draw_runs(table, curves).axes[0].lines) == 4


def test_runs_with_the_same_overrides_have_their_folders_as_labels(tmp_path) -> None:
    for name, loss in (("first/0", 3.0), ("first/1", 2.0), ("second/0", 1.0)):
        make_run(tmp_path / name, loss, f"optimizer.lr={name[-1]}")
    table, curves = tabulate(find_runs([tmp_path])[0])
    assert labels(table) == ["second/0", "optimizer.lr=1", "first/0"]
    ticks = [axis.get_xticks() for axis in draw_runs(table, curves).axes]
    assert all(tick == int(tick) for of_axis in ticks for tick in of_axis)  # of steps


def test_a_throughput_of_one_step_has_no_panel(tmp_path) -> None:
    (make_run(tmp_path, 4.0) / "metrics.csv").write_text("step,train/loss,val/loss,tokens_per_s\n4,9,4,80.5\n")
    assert len(draw_runs(*tabulate([read_run(tmp_path)])).axes) == 1


def test_the_default_is_the_newest_runs_of_both_folders(tmp_path) -> None:
    assert find_runs(root=tmp_path) == ([], [])
    places = [tmp_path / ("outputs" if i % 2 else "multirun") / "gpt" / str(i) for i in range(NEWEST + 2)]
    for i, place in enumerate(places):
        make_run(place, 1.0)
        os.utime(place / "record.json", (i, i))
    assert [run.folder for run in find_runs(root=tmp_path)[0]] == places[:1:-1]


def test_the_committed_demo_has_learned_and_has_curves() -> None:
    metrics = {name: entry["value"] for name, entry in json.loads(COMMITTED.read_text())["metrics"].items()}
    for model, margin in MARGIN_NATS.items():
        assert metrics[f"{model}/unigram"] - metrics[f"{model}/after"] >= margin
    assert metrics["gpt/after"] < metrics["gpt/bigram"] and metrics["bert/after"] < metrics["bert/context-free"]
    table, curves = demo_runs()
    assert set(labels(table)) == set(curves) and all(len(curve) >= 8 for curve in curves.values())
    for model, title in TITLES.items():  # no spike above the untrained loss
        assert curves[title.rpartition(", ")[0]]["train"].max() < metrics[f"{model}/before"]
