"""The parity check as a user runs it: it passes if all layouts agree and fails if one does not."""

import json
import subprocess
from pathlib import Path

import pytest
import warm
from entry_points import environment

from analysis.correctness import loss_curves

CARD = Path(__file__).resolve().parents[2] / "analysis" / "correctness" / "parity.py"
SMALL = ("--architecture", "gpt", "--dtype", "fp64", "--tp", "1", "2", "--dp", "1", "2", "--max-world", "2")


def run_card(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Run the check from another working directory with a record; temporary files are below `folder`."""
    temporary = folder / "temporary"
    temporary.mkdir()
    command = [str(CARD), *options, "--record", "card.json"]
    done = warm.run(command, folder, environment(TMPDIR=str(temporary)), timeout=500)
    assert [path.name for path in temporary.glob("lmscale_*")] == []
    path = folder / "card.json"
    return done, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def test_the_difference_of_two_loss_curves_is_the_largest_up_to_a_step() -> None:
    assert loss_curves.compare([2.0, 4.0, 8.0, 1.0], [2.0, 5.0, 8.0, 1.0]) == {1: 0.0, 3: 0.25, 4: 0.25}


def verdicts(record: dict) -> dict[str, str]:
    return {name: comparison["verdict"] for name, comparison in record["comparisons"].items()}


@pytest.mark.slow
def test_two_ranks_of_either_kind_train_as_one_process(tmp_path) -> None:
    dropouts = ("none", "attention_sdpa")
    done, record = run_card(tmp_path, *SMALL, "--steps", "2", "--dropout", *dropouts, "--every-parameter")
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(record) == {
        "gpt/fp64/none/tp2_dp1": "pass",
        "gpt/fp64/none/tp1_dp2": "pass",
        # The dropout stream differs per layout, so equality is not claimed.
        "gpt/fp64/attention_sdpa/tp2_dp1": "near",
        "gpt/fp64/attention_sdpa/tp1_dp2": "near",
    }
    assert "comparisons: 4 = 2 pass + 0 fail + 2 near" in done.stdout
    assert done.stdout.count("  transformer.final_norm.weight\n") == 4
    metrics = record["metrics"]
    assert metrics["gpt/fp64/none/tp2_dp1/loss"]["value"] < 1e-12
    assert 1e-6 < metrics["gpt/fp64/attention_sdpa/tp2_dp1/loss"]["value"] < 1e-2


@pytest.mark.parametrize(("mutant", "tp_size", "dp_size"), [("seed", "2", "1"), ("lr", "1", "2")])
@pytest.mark.slow
def test_a_layout_with_different_results_fails(tmp_path, mutant, tp_size, dp_size) -> None:
    small = (*SMALL, "--tp", tp_size, "--dp", dp_size, "--steps", "2", "--dropout", "none")
    done, record = run_card(tmp_path, *small, "--mutant", mutant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "comparisons: 1 = 0 pass + 1 fail + 0 near" in done.stdout
    assert list(verdicts(record).values()) == ["FAIL: loss, grad_norm, moment, parameter"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "`--steps` must be at least 1 and at most 5, but is 0"),
        (("--tp", "3"), "`model.num_attention_heads` must be a multiple of `parallel.tp_size` (3)"),
        (("--dtype", "fp16"), "invalid choice: 'fp16'"),
    ],
)
def test_invalid_options_are_refused_in_one_line(tmp_path, options, message) -> None:
    done, record = run_card(tmp_path, *options)
    assert (done.returncode, done.stdout, record) == (2, "", {})
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.slow
def test_the_whole_grid_is_within_its_bounds(tmp_path) -> None:
    done, record = run_card(tmp_path, "--dtype", "fp64", "fp32", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(verdicts(record).values())
    assert (found.count("pass"), found.count("near")) == (72, 24)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["seed", "lr"])
def test_every_comparison_of_the_grid_can_fail(tmp_path, mutant) -> None:
    equal = ("--dropout", "none", "hidden", "attention_exact")
    done, record = run_card(tmp_path, "--dtype", "fp64", "fp32", "bf16", *equal, "--mutant", mutant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [name for name, verdict in verdicts(record).items() if not verdict.startswith("FAIL")] == []
