"""A preparation on a Slurm cluster: the submitted jobs, run in order by stubs of Slurm's commands."""

import os

import pytest
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
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done
exec "$@"
"""
SCONTROL = "#!/bin/bash\necho here\n"


@pytest.mark.slow
def test_slurm_gets_one_array_job_per_stage_each_depending_on_the_previous(tmp_path, shared_data, monkeypatch) -> None:
    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()
    log.mkdir()
    for name, content in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (bin_folder / name).write_text(content)
        (bin_folder / name).chmod(0o755)
    write_lines(tmp_path / "a.jsonl", passages(shared_data, 60))
    options = (*SMALL, f"sources.local.path={tmp_path / 'a.jsonl'}", "dedup.bands=3")
    local = prepare(*options, f"output={tmp_path / 'local'}")
    assert local.returncode == 0, local.stderr
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_LOG", str(log))
    cluster = ("launcher=slurm", "launcher.partition=cpu", "+launcher.sbatch.account=mine")
    done = prepare(
        *[option for option in options if not option.startswith("launcher")], *cluster, f"output={tmp_path / 'slurm'}"
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
