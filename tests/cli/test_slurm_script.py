"""The sbatch script of docs/guides/clusters.md, with stubs of srun and scontrol."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from entry_points import REPOSITORY

SCRIPT = re.search(r"```\n(#!/bin/bash\n.*?)```", (REPOSITORY / "docs/guides/clusters.md").read_text(), re.S)[1]


def stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("code", "most"), [(0, 0), (1, 3), (2, 0), (3, 0), (4, 0), (5, 3), (74, 0), (75, 5), (134, 3), (137, 3), (138, 5)]
)
def test_the_job_ends_with_the_code_of_the_run_and_is_requeued_by_the_guides_rule(
    tmp_path, code: int, most: int
) -> None:
    """Five times the same code: preemptions are always requeued, lost ranks three times, all others never."""
    stub(tmp_path / "bin/srun", f"exit {code}")
    stub(tmp_path / "bin/scontrol", f'echo "$@" >> {tmp_path / "requeued"}')
    stub(tmp_path / ".venv/bin/activate", "")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    for _ in range(5):
        done = subprocess.run(
            ["bash", "-c", SCRIPT],
            cwd=tmp_path,
            env={"PATH": path, "SLURM_JOB_ID": "17"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (code, "")
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 17\n" * most
