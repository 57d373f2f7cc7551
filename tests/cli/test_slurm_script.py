"""The page of 64 H100: its sbatch script, with stubs of srun and scontrol, and its numbers."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from entry_points import REPOSITORY
from plan_output import planned

from lmscale.runtime.world import world_from_outside

GUIDE = (REPOSITORY / "docs" / "guides" / "h100_64.md").read_text(encoding="utf-8")
RECORDS = REPOSITORY / "analysis" / "data_costs" / "records"
SCRIPT = re.search(r"```\n(#!/bin/bash\n.*?)```", GUIDE, re.S)[1]


def stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def submit(folder: Path, srun: str, num_nodes: int = 8, script: str = SCRIPT) -> subprocess.CompletedProcess:
    """Run the script as the batch step of a job of `num_nodes` nodes called n1, n2, ..."""
    stub(folder / "bin/srun", srun)
    names = f"seq -f n%g {num_nodes}"
    stub(folder / "bin/scontrol", f'if [ "$1" = show ]; then {names}; else echo "$@" >> {folder / "requeued"}; fi')
    stub(folder / ".venv/bin/activate", "")
    nodes = f"n[1-{num_nodes}]"
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(num_nodes), "SLURM_JOB_NODELIST": nodes}
    job |= {"SLURM_NNODES": str(num_nodes), "SLURM_NODELIST": nodes, "SLURM_NTASKS_PER_NODE": "8"}
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **job}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "most"),
    [(code, 0) for code in (0, 2, 3, 4, 74)]
    + [(code, 3) for code in (1, 5, 134, 137, 139)]
    + [(code, 5) for code in (75, 138, 143)],
)
def test_the_job_ends_with_the_code_of_the_run_and_is_requeued_by_the_guides_rule(
    tmp_path, code: int, most: int
) -> None:
    """Five times the same code: preemptions are always requeued, lost ranks three times, all others never."""
    for _ in range(5):
        done = submit(tmp_path, f"exit {code}")
        assert (done.returncode, done.stderr) == (code, "")
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 17\n" * most


WITH_SPARE = SCRIPT.replace("--nodes=4-8", "--nodes=4-9")
ON_512 = (
    SCRIPT.replace("--nodes=4-8", "--nodes=32-64")
    .replace("parallel.tp_size=2", "parallel.tp_size=8")
    .replace("micro_batch_size=16", "micro_batch_size=8")
)


@pytest.mark.parametrize(
    ("script", "given", "used"),
    [(SCRIPT, 4, 4), (SCRIPT, 7, 4), (SCRIPT, 8, 8), (WITH_SPARE, 9, 8)]
    + [(ON_512, 32, 32), (ON_512, 63, 32), (ON_512, 64, 64)],
)
def test_after_a_requeue_any_number_of_nodes_trains_with_the_same_batch(
    monkeypatch, tmp_path, script, given, used
) -> None:
    """With fewer nodes the job had ended with 2, which the script never requeues.

    The planner checks what the script starts, and the launcher reads what Slurm would set for the last rank.
    """
    low, high = map(int, re.search(r"--nodes=(\d+)-(\d+)", script).groups())
    assert low <= given <= high
    done = submit(tmp_path, f'echo "$@" > {tmp_path / "started"}; env > {tmp_path / "job"}', given, script)
    assert (done.returncode, done.stderr) == (0, "")
    words = (tmp_path / "started").read_text().split()
    options, overrides = words[: words.index("python")], words[words.index("src/train.py") + 1 :]
    num_tasks = 8 * used
    assert {f"--nodes={used}", f"--ntasks={num_tasks}", "--ntasks-per-node=8"} < set(options)
    names = ",".join(f"n{n + 1}" for n in range(used))
    assert f"--nodelist={names}" in options  # rank 0 is on the job's first node
    job = dict(line.split("=", 1) for line in (tmp_path / "job").read_text().splitlines() if line.startswith("SLURM_"))
    step = {"ID": 0, "NUM_NODES": used, "NUM_TASKS": num_tasks, "NODELIST": names}
    step = {f"SLURM_STEP_{name}": str(value) for name, value in step.items()}
    task = {"SLURM_NTASKS": str(num_tasks), "SLURM_PROCID": str(num_tasks - 1), "SLURM_LOCALID": "7"}
    monkeypatch.setattr(os, "environ", job | step | task)
    world = world_from_outside()
    assert (world.size, world.local_size, world.rank, world.address) == (num_tasks, 8, num_tasks - 1, ("n1", 15017))
    assert "parallel.dp_size=auto" in overrides
    kept = [o for o in overrides if o.startswith(("model", "parallel", "micro_batch_size", "global_batch_size"))]
    monkeypatch.undo()
    answer = planned(*kept, "cluster=h100", f"num_devices={num_tasks}")
    layout = answer["layout"]
    assert (layout["num_devices"], layout["global_batch_size"], layout["recompute"]) == (num_tasks, 512, "selective")
    assert answer["notes"] == []


def test_the_guides_numbers_follow_from_the_plan_and_the_records() -> None:
    """Step times of the planner and core-hours of the records."""
    keys = ["model=gpt_8.3b_24heads", "cluster=h100", "model.recompute=selective"]
    keys += ["parallel.zero1=true", "parallel.batch_halves=true", "parallel.sequence_parallel=true"]
    sizes = {64: (2, 16), 32: (2, 16), 512: (8, 8)}
    eight, four, large = (
        planned(*keys, f"num_devices={n}", f"parallel.tp_size={p}", f"micro_batch_size={b}")
        for n, (p, b) in sizes.items()
    )
    text = " ".join(GUIDE.split())
    assert f"takes {eight['step_time_s']['total']:.2f} s per step, modelled, and {eight['days']:.1f} days" in text
    assert f"on 32 it takes {four['step_time_s']['total']:.2f} s" in text
    assert f"modelled {large['step_time_s']['total']:.2f} s per step" in text
    most, most_on_four = (plan["rank_memory_bytes"]["selective"]["total"] / 2**30 for plan in (eight, four))
    assert f"at most {most:.1f}, or {most_on_four:.1f} on 32 GPUs, counted" in text
    assert f"| {eight['mfu']:.0%}".replace("%", " % modelled") in text

    rates = {"language": "clean/all_steps", "dedup": "whole/ours", "tokenize": "gpt/1_cores/stage/wall"}
    records = {name: json.loads((RECORDS / f"{name}_cost_cpu.json").read_text())["metrics"] for name in rates}
    rates = [records[name][metric]["value"] for name, metric in rates.items()]
    rates.insert(2, records["dedup"]["whole/evaluation_text"]["value"])
    hours = [174e3 / rate / 3600 for rate in rates]
    rows = [f"| {rate:.1f} | {hour:.1f} |" for rate, hour in zip(rates, hours, strict=True)]
    assert re.findall(r"\| \d+\.\d \| \d+\.\d \|", GUIDE) == rows and f"| all | | {sum(hours):.1f} |" in GUIDE
