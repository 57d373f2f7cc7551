"""Random kill -9: nothing is lost, and the loss curve equals that of an undisturbed run."""

import json
import subprocess
import sys

import pytest
from entry_points import REPOSITORY, environment


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ten_kills_lose_nothing(tmp_path) -> None:
    command = [sys.executable, str(REPOSITORY / "analysis" / "correctness" / "soak.py"), "--kills", "10"]
    command += ["--folder", str(tmp_path / "soak"), "--seed", "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / "soak" / "soak.json").read_text())["metrics"]
    metrics = {name: entry["value"] for name, entry in entries.items()}
    assert sum(value for name, value in metrics.items() if name.startswith("kills/")) == 10
    assert metrics["kills_in_mid_save"] >= 1 and metrics["checkpoints_lost"] == 0
    assert [value for name, value in metrics.items() if name.startswith("differing/")] == [0, 0, 0]
