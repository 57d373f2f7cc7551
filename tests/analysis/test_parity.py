"""The parity check: layouts agree with one process, and a difference is reported."""

import math

import pytest

from analysis.correctness import parity


def steps(*losses: float) -> list[dict[str, float]]:
    return [{"train/loss": loss, "grad_norm": 1.0} for loss in losses]


def test_the_difference_of_two_loss_curves_is_the_largest_up_to_a_step() -> None:
    found = parity.compare(steps(2.0, 4.0, 8.0, 1.0), steps(2.0, 5.0, 8.0, 1.0), "train/loss")
    assert found == {1: 0.0, 3: 0.25, 4: 0.25}
    assert parity.compare(steps(2.0), steps(math.nan), "train/loss") == {1: math.inf}


@pytest.mark.parametrize("gap", [0.0, 1e-9])
def test_a_layout_that_differs_fails_the_check(monkeypatch, capsys, gap: float) -> None:
    monkeypatch.setattr(parity, "train", lambda family, tp_size, *_: steps(2.0 + gap * (tp_size == 4)))
    monkeypatch.setattr("sys.argv", ["parity.py", "--steps", "1"])
    assert parity.main() == (1 if gap else 0)
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["pass", "FAIL" if gap else "pass", "pass", "pass"] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_trains_as_one_process(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["parity.py", "--steps", "2"])
    assert parity.main() == 0
