"""Random kill -9: nothing is lost, and the loss curve equals that of an undisturbed run."""

import json
import subprocess
import sys

import pytest
from entry_points import REPOSITORY, environment

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks with ps and /proc")


def soak(tmp_path, kills: int, steps_per_kill: int, timeout_s: float) -> dict:
    command = [sys.executable, str(REPOSITORY / "analysis" / "correctness" / "soak.py"), "--kills", str(kills)]
    command += ["--steps-per-kill", str(steps_per_kill), "--folder", str(tmp_path / "soak"), "--seed", "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "soak" / "soak.json").read_text())["metrics"]
    return {name: entry["value"] for name, entry in metrics.items()}


def assert_nothing_lost(metrics: dict, kills: int) -> None:
    assert sum(value for name, value in metrics.items() if name.startswith("kills/")) == kills
    assert metrics["checkpoints_lost"] == 0
    assert [value for name, value in metrics.items() if name.startswith("differing/")] == [0, 0, 0]


@linux_only
@pytest.mark.slow
@pytest.mark.timeout(660)
def test_two_kills_lose_nothing(tmp_path) -> None:
    assert_nothing_lost(soak(tmp_path, 2, 10, 600), 2)


@linux_only
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_lose_nothing(tmp_path) -> None:
    metrics = soak(tmp_path, 30, 30, 1700)
    assert_nothing_lost(metrics, 30)
    assert metrics["kills_in_mid_save"] >= 5
