"""The coordinate check passes a parametrization that transfers, and sees each wrong multiplier that it can see."""

import sys

import pytest

from analysis.coordinate_check import run as coordinate_check
from analysis.report.records import read_lines
from lmscale.models import parametrization

SMALL = ["model=gpt_tiny", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_layers=2"]
SMALL += ["optimizer.lr=4e-3"]
SIZES = {"width": [64, 256], "depth": [2, 8], "head size": [16, 128]}


def failing(family: str, name: str, axes: dict[str, list[int]], seeds: int) -> list[str]:
    """The parts that fail, as `axis part`."""
    words = f"model={family}_tiny", "model.initializer_std=0.02", f"model.parametrization={name}", "optimizer.lr=1e-3"
    config = coordinate_check.read_config(list(words))
    axes = dict.fromkeys(SIZES, []) | axes
    rows = coordinate_check.check(config, axes, seeds=seeds, steps=5, readout_steps=15)
    return [f"{row['axis']} {row['part']}" for row in rows if abs(row["power"]) > 0.25]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_completep_passes_over_every_size_and_the_standard_fails(family: str) -> None:
    assert failing(family, "completep", SIZES, seeds=3) == []  # with one seed a part of BERT fails by chance
    failed = failing(family, "standard", SIZES, seeds=1)
    assert {"width last layer", "width first mlp", "depth last layer", "head size last scores"} <= set(failed)


@pytest.mark.parametrize(
    "family, change, parts",
    [
        ("gpt", {"rate_factor": lambda self, role: 1.0}, {"width last layer"}),
        ("gpt", {"output_factor": 1.0}, {"width logits"}),
        ("bert", {"output_factor": 1.0}, {"width logits", "width sentence order"}),
        ("gpt", {"attention_factor": 1.0}, {"head size first scores", "head size last scores"}),
        ("gpt", {"residual_factor": 1.0}, {"depth last layer"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_multiplier_fails(monkeypatch, family: str, change: dict, parts: set[str]) -> None:
    wrong = type("Wrong", (parametrization.CompleteP,), {})
    for name, value in change.items():
        if callable(value):
            monkeypatch.setattr(wrong, name, value, raising=False)
        else:  # an attribute that the class sets: nothing else may replace it
            monkeypatch.setattr(wrong, name, property(lambda self, v=value: v, lambda self, _: None), raising=False)
    monkeypatch.setitem(parametrization.PARAMETRIZATIONS, "completep", wrong)
    axis = next(axis for axis in SIZES if min(parts).startswith(axis))
    assert parts <= set(failing(family, "completep", {axis: SIZES[axis]}, seeds=1))


def test_the_command_writes_figure_and_record_and_tells_by_its_exit_code(tmp_path, monkeypatch) -> None:
    sizes = ["--widths", "32", "64", "--depths", "--seeds", "1", "--steps", "2", "--readout-steps", "2"]
    for bound, code in (("9", 0), ("1e-9", 1)):
        records = tmp_path / f"{code}.jsonl"
        own = [*sizes, "--bound", bound, "--output", str(tmp_path / "c.png"), "--records", str(records)]
        monkeypatch.setattr(sys, "argv", ["run.py", *own, *SMALL])
        with pytest.raises(SystemExit) as ended:
            coordinate_check.main()
        assert ended.value.code == code
        assert (tmp_path / "c.png").stat().st_size > 10_000
        record = read_lines(records)["gpt_tiny_standard"]
        assert len(record["config"]["rows"]) == len(record["metrics"]) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--widths", "128", "100"], "a width must be a multiple of the head size (16), but is 100"),
        (["--widths", "128", "24"], "a width must be a multiple of the head size (16), but is 24"),
        (["--output", "c.txt"], "`--output` must end in one of "),
        (
            [
                "optimizer.lr=1e30",
                "--widths",
                "32",
                "64",
                "--depths",
                "--seeds",
                "1",
                "--steps",
                "1",
                "--readout-steps",
                "1",
            ],
            "`optimizer.lr` must move every part by a finite distance, but with 1e+30 the logits moves by nan",
        ),
        (["--bound", "nan"], "`--bound` must be above 0, but is nan"),
        (["--widths", "64"], "`--widths` must have at least two sizes or none, but has 64"),
        (["--widths", "--depths"], "`--widths`, `--depths` or `--head-sizes` must have sizes, but all have none"),
        (["--head-sizes", "16", "48"], "a width must be a multiple of the head size (48), but is 64"),
        (["optimzer.lr=1"], "`optimzer.lr` is not a known key"),
        (["model.parametrization=mu"], "`model.parametrization` must be one of standard, mup, completep"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, words: list[str], message: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        coordinate_check.main()
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith(f"error: {message}") and line.count("\n") == 1
