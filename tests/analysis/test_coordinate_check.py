"""The coordinate check passes a parametrization that transfers, and sees each wrong multiplier that it can see."""

import json
import sys

import pytest

from analysis.coordinate_check import run as coordinate_check
from lmscale.models import parametrization

SMALL = ["model=gpt_tiny", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_layers=2"]
SMALL += ["optimizer.lr=4e-3"]


def powers(name: str, widths: list[int], depths: list[int], bound: float = 0.35) -> list[str]:
    """The parts that fail, as `axis part`."""
    config = coordinate_check.read_config([*SMALL, f"model.parametrization={name}"])
    rows = coordinate_check.check(config, widths, depths, seeds=1, steps=6, readout_steps=12)
    return [f"{row['axis']} {row['part']}" for row in rows if abs(row["power"]) > bound]


def test_completep_passes_over_width_and_depth_and_the_standard_fails() -> None:
    assert powers("completep", [64, 128, 256], [2, 4, 8]) == []
    failed = powers("standard", [64, 256], [2, 8])
    assert {"width last layer", "width first mlp", "depth last layer"} <= set(failed)


@pytest.mark.parametrize(
    "change, part",
    [
        ({"rate_factor": lambda self, role: 1.0}, "width last layer"),
        ({"output_factor": 1.0}, "width logits"),
        ({"residual_factor": 1.0}, "depth last layer"),
    ],
    ids=["rate", "readout", "residual"],
)
def test_a_wrong_multiplier_fails(monkeypatch, change: dict, part: str) -> None:
    wrong = type("Wrong", (parametrization.CompleteP,), {})
    for name, value in change.items():
        if callable(value):
            monkeypatch.setattr(wrong, name, value, raising=False)
        else:  # an attribute that the class sets: nothing else may replace it
            monkeypatch.setattr(wrong, name, property(lambda self, v=value: v, lambda self, _: None), raising=False)
    monkeypatch.setitem(parametrization.PARAMETRIZATIONS, "completep", wrong)
    axis = part.split()[0]
    assert part in powers("completep", [64, 256] * (axis == "width"), [2, 8] * (axis == "depth"))


def test_the_command_writes_figure_and_record_and_tells_by_its_exit_code(tmp_path, monkeypatch) -> None:
    sizes = ["--widths", "32", "64", "--depths", "--seeds", "1", "--steps", "2", "--readout-steps", "2"]
    for bound, code in (("9", 0), ("0", 1)):
        own = [*sizes, "--bound", bound, "--output", str(tmp_path / "c.png")]
        monkeypatch.setattr(sys, "argv", ["run.py", *own, *SMALL])
        with pytest.raises(SystemExit) as ended:
            coordinate_check.main()
        assert ended.value.code == code
        assert (tmp_path / "c.png").stat().st_size > 10_000
        assert len(json.loads((tmp_path / "c.json").read_text())["rows"]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--widths", "128", "100"], "a width must be a multiple of the head size (16), but is 100"),
        (["--widths", "128", "24"], "a width must be a multiple of the head size (16), but is 24"),
        (["--output", "c.txt"], "`--output` must end in .png, .pdf, .svg, but is c.txt"),
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
        (["--widths", "64"], "`--widths` must have at least two sizes or none, but has 64"),
        (["--widths", "--depths"], "`--widths` or `--depths` must have sizes, but both have none"),
        (["model.parametrization=mu"], "`model.parametrization` must be one of standard, mup, completep"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, words: list[str], message: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        coordinate_check.main()
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith(f"error: {message}") and line.count("\n") == 1
