"""Figure 6 from any runs: values from metrics.csv, and curves that are distinguishable in greyscale."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from analysis.model_size import perplexity_curves
from analysis.report.style import PAGE_WIDTH

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((2, 24, 4), (3, 32, 4), (5, 40, 8), (7, 48, 8))


def make_run(folder: Path, perplexities: dict[int, float], shape=SHAPES[0], architecture: str = "gpt", **data) -> Path:
    """A run folder with one row for each of the first 30 steps, some with validation."""
    folder.mkdir()
    rows = [f"{step},5.0,{perplexities.get(step, '')}" for step in range(1, max([30, *perplexities]) + 1)]
    (folder / "metrics.csv").write_text("\n".join(["step,train/loss,val/perplexity", *rows]) + "\n")
    model = dict(zip(("num_layers", "hidden_size", "num_attention_heads"), shape, strict=True))
    config = {"name": "small", "model": model | {"architecture": architecture}, "tokenizer": {"vocab_size": 400}}
    config |= {"data": {"path": "a.txt", "seq_length": 16} | data, "global_batch_size": 6}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_main(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["perplexity_curves.py", *map(str, arguments)])
    return perplexity_curves.main()


@pytest.fixture
def figure(tmp_path: Path) -> Figure:
    runs = [make_run(tmp_path / str(i), {10: 90.0 - i, 20: 50.0 - i, 30: 30.0 - i}, SHAPES[i]) for i in range(4)]
    curves = [perplexity_curves.read_curve(run) for run in runs]
    figure = perplexity_curves.draw_perplexity({curve.label: curve.points for curve in curves})
    yield figure
    plt.close(figure)


def test_points_are_validated_steps_over_training_tokens(tmp_path: Path) -> None:
    curve = perplexity_curves.read_curve(make_run(tmp_path / "a", {7: 80.5, 30: 41.25}))
    assert curve.label == "small, 2 x 24"
    assert curve.points.to_dict("list") == {"steps": [7, 30], "perplexity": [80.5, 41.25], "tokens": [7 * 96, 30 * 96]}


def test_curves_show_the_values_of_the_files(figure: Figure) -> None:
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in lines] == [[10, 20, 30]] * 4
    assert [list(line.get_ydata()) for line in lines] == [[90 - i, 50 - i, 30 - i] for i in range(4)]


def test_a_curve_of_one_point_has_a_marker() -> None:
    table = pd.DataFrame({"steps": [40], "tokens": [960], "perplexity": [83.0]})
    (line,) = (
        line for line in perplexity_curves.draw_perplexity({"a": table}).axes[0].get_lines() if len(line.get_xdata())
    )
    assert line.get_marker() not in ("None", None) and line.get_markevery() == 1  # a fraction of one point shows none


def test_curves_differ_without_colour(figure: Figure) -> None:
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    greys = sorted(sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(x.get_color()), strict=True)) for x in lines)
    assert min(b - a for a, b in zip(greys, greys[1:], strict=False)) > 0.08 and greys[-1] < 0.75
    assert len({str(line.get_marker()) for line in lines}) == 4
    assert len({str(line._dash_pattern) for line in lines}) == 4


def test_the_figure_has_page_width_and_names_each_curve_at_its_end(figure: Figure) -> None:
    axis = figure.axes[0]
    assert figure.get_figwidth() == PAGE_WIDTH and axis.get_legend() is None
    assert len({text.get_text() for text in axis.texts}) == 4
    texts = [axis.xaxis.label, axis.yaxis.label, *axis.get_xticklabels(), *axis.texts]
    assert min(text.get_fontsize() for text in texts) >= 8
    assert axis.get_ylabel() == "validation perplexity, log scale" and axis.get_xlabel() == "iterations"


def test_the_script_draws_a_figure_and_prints_the_lowest_perplexities(tmp_path: Path, monkeypatch, capsys) -> None:
    runs = [make_run(tmp_path / "a", {10: 90.0, 20: 50.0}), make_run(tmp_path / "b", {30: 20.0}, SHAPES[1])]
    picture = tmp_path / "pictures" / "curves.png"
    assert run_main(monkeypatch, *runs, "--x", "tokens", "--output", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.out.startswith("small, 2 x 24: lowest perplexity 50\n") and printed.err == ""


def test_runs_on_other_text_are_drawn_with_a_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    runs = [make_run(tmp_path / "a", {10: 9.0}), make_run(tmp_path / "b", {10: 8.0}, path="b.txt")]
    assert run_main(monkeypatch, *runs, "--labels", "one", "two", "--output", tmp_path / "c.png") == 0
    assert capsys.readouterr().err == "warning: the runs differ in `data`: their perplexities may not be comparable\n"


def test_an_error_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    good, never = make_run(tmp_path / "a", {10: 9.0}), make_run(tmp_path / "never", {})
    bert, broken = make_run(tmp_path / "bert", {10: 9.0}, SHAPES[1], "bert"), make_run(tmp_path / "broken", {10: 9.0})
    (broken / "metrics.csv").write_text("step\n1\n")
    for arguments, message in (
        ((tmp_path / "none",), "none has no metrics.csv"),
        ((never,), "a run must have been validated"),
        ((broken,), "cannot be read as one"),
        ((good, good), "must name every run differently, but 'small, 2 x 24' occurs twice"),
        ((good, bert), "must be of one architecture, but are of bert and gpt"),
        ((good, "--labels", "a", "b"), "the number of `--labels` must equal the number of runs (1), but is 2"),
    ):
        assert run_main(monkeypatch, *arguments, "--output", tmp_path / "picture.png") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", "{", ""),
        ("config.json", '"tokenizer"', '"other"'),
        ("config.json", '"architecture"', '"other"'),
        ("config.json", '"global_batch_size": 6', '"global_batch_size": "6"'),
        ("metrics.csv", "9.0", "nine"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, monkeypatch, capsys, file: str, old: str, new: str) -> None:
    run = make_run(tmp_path / "a", {10: 9.0})
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new))
    assert run_main(monkeypatch, run, "--output", tmp_path / "picture.png") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: a run must be a run folder, but {run} cannot be read as one")
    assert error.count("\n") == 1 and not (tmp_path / "picture.png").exists()
