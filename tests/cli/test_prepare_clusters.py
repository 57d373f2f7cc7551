"""A preparation on a Slurm cluster: the submitted jobs, run in order by stubs of Slurm's commands."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from entry_points import environment
from preparing import SMALL, digests, passages, prepare, write_lines

# Runs an array job immediately, task by task, and prints what sbatch prints. Dependencies are therefore always met.
SBATCH = """#!/bin/bash
for argument; do case "$argument" in --export=*) export RUN_OFFSET=${argument##*=};; esac; done
script="$argument"
number=$(( $(ls "$STANDIN_LOG" | wc -l) + 1 ))
cp "$script" "$STANDIN_LOG/$number"; printf '%s\\n' "$@" > "$STANDIN_LOG/$number.arguments"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 ${last:-0}); do
  SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here bash "$script" > "$STANDIN_LOG/$number.$task.out" 2>&1 || exit 1
done
echo "Submitted batch job $number"
"""
# Only keeps the script, for the test to run its tasks.
SBATCH_LATER = """#!/bin/bash
number=$(( $(ls "$STANDIN_LOG" | wc -l) + 1 ))
cp "${@: -1}" "$STANDIN_LOG/$(printf %03d $number)"
echo "Submitted batch job $number"
"""
# Accepts the first four jobs, two each of stages `clean` and `ids`.
SBATCH_REFUSES = """#!/bin/bash
number=$(( $(ls "$STANDIN_LOG" | wc -l) + 1 ))
printf '%s ' "$@" > "$STANDIN_LOG/$number"
if [ $number -gt 4 ]; then echo "sbatch: error: Batch job submission failed: Invalid qos" >&2; exit 1; fi
echo "Submitted batch job 70$number"
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done
exec "$@"
"""
SCONTROL = "#!/bin/bash\necho here\n"


CLUSTER = ("launcher=slurm", "launcher.partition=cpu", "+launcher.sbatch.account=mine")


def install_stubs(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> Path:
    """Put stubs of Slurm's commands first in PATH; return the folder in which `sbatch` keeps its scripts."""
    bin_folder, log = folder / "bin", folder / "log"
    bin_folder.mkdir()
    log.mkdir()
    for name, content in {"sbatch": sbatch, "srun": SRUN, "scontrol": SCONTROL}.items():
        (bin_folder / name).write_text(content)
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_LOG", str(log))
    return log


@pytest.mark.slow
def test_slurm_gets_one_array_job_per_stage_each_depending_on_the_previous(tmp_path, shared_data, monkeypatch) -> None:
    write_lines(tmp_path / "a.jsonl", passages(shared_data, 60))
    options = (*SMALL, f"sources.local.path={tmp_path / 'a.jsonl'}", "dedup.bands=3")
    local = prepare(*options, f"output={tmp_path / 'local'}")
    assert local.returncode == 0, local.stderr
    log = install_stubs(tmp_path, monkeypatch, SBATCH)
    done = prepare(
        *[option for option in options if not option.startswith("launcher")], *CLUSTER, f"output={tmp_path / 'slurm'}"
    )
    assert done.returncode == 0, done.stderr
    assert "submitted" in done.stdout
    assert digests(tmp_path / "slurm") == digests(tmp_path / "local")
    left = {path.name for path in (tmp_path / "slurm" / ".work").iterdir() if path.is_dir()}
    assert left == {"logs"}
    scripts = [path for path in log.iterdir() if path.name.isdecimal()]
    arrays = [path for path in scripts if "launch_pickled_pipeline" in path.read_text()]
    assert len(arrays) == 11  # stages
    for script in arrays:
        assert {"#SBATCH --partition=cpu", "#SBATCH --account=mine"} <= set(script.read_text().splitlines())
    depending = [path for path in log.glob("*.arguments") if "--dependency=afterok:" in path.read_text()]
    assert len(depending) == len(arrays) - 1


@pytest.mark.slow
def test_a_second_submission_cannot_make_the_first_one_lose_documents(tmp_path, shared_data, monkeypatch) -> None:
    """It shortens the list of tasks, so that a task of the first array ends without error and without its work."""
    texts = passages(shared_data, 60)
    for number in range(2):
        write_lines(tmp_path / "in" / f"{number}.jsonl", texts[number::2])
    log = install_stubs(tmp_path, monkeypatch, SBATCH_LATER)
    options = [option for option in SMALL if not option.startswith("launcher")]
    options += [*CLUSTER, f"sources.local.path={tmp_path / 'in'}", f"output={tmp_path / 'out'}"]

    def run(script: Path, task: int = 0) -> subprocess.CompletedProcess:
        job = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "here", "RUN_OFFSET": "0"}
        return subprocess.run(["bash", str(script)], env=environment() | job, capture_output=True, text=True)

    assert prepare(*options).returncode == 0
    clean, ids = (
        next(p for p in sorted(log.iterdir()) if f"lmscale_{name}" in p.read_text()) for name in ("clean", "ids")
    )
    assert run(clean, 0).returncode == 0
    assert prepare(*options).returncode == 0
    assert run(clean, 1).returncode == 0  # of the first array
    refused = run(ids)
    assert refused.returncode != 0 and "all 2 tasks of `clean` must be complete" in refused.stdout + refused.stderr
    assert run(clean, 0).returncode == 0  # of the second array
    assert run(ids).returncode == 0


def test_a_refusal_by_sbatch_is_one_line_with_the_stage_and_the_jobs_already_submitted(tmp_path, monkeypatch) -> None:
    write_lines(tmp_path / "a.jsonl", ["one", "two"])
    log = install_stubs(tmp_path, monkeypatch, SBATCH_REFUSES)
    options = [option for option in SMALL if not option.startswith("launcher")]
    done = prepare(*options, *CLUSTER, f"sources.local.path={tmp_path / 'a.jsonl'}", f"output={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (
        2,
        "error: sbatch must accept stage `sort`, but: sbatch: error: Batch job submission failed: Invalid "
        "qos (jobs already submitted: 701 703)\n",
    )
    waits = [re.findall("afterok:([0-9]+)", (log / str(number)).read_text()) for number in (1, 3, 5)]
    assert waits == [[], ["701"], ["703"]]  # for the stage before
