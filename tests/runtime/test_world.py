"""Who started this process: every variable of torchrun, Slurm, MPI and Lightning set, empty, wrong and left over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmscale.runtime import world
from lmscale.runtime.world import COMPILE_WORKERS, World, is_first_rank, was_requeued, world_from_outside

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a3",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "study",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "a[03-05]",
}
# A step on three of the job's four nodes: srun leaves the job's own SLURM_NNODES and SLURM_NODELIST as they are.
STEP_ON_SOME_NODES = {
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "4",
    "SLURM_NODELIST": "a[03-06]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "a[03-05]",
}
BATCH = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
OF_TORCHRUN = World("torchrun", 6, 2, 3, 1, address=("a3", 29500))
OF_SRUN = World("srun", 6, 2, 3, 1, address=("a03", 19567))
MISSING = "must be set where TORCHELASTIC_RUN_ID is, but is not"
NUMBER = "must be a whole number, but is"
CONSECUTIVE = r"because rank 3 is on a node of 2 consecutive ranks \(srun --distribution=block\)"
PORT = "must be at least 1 and at most 65535, but is"
FOREIGN = r"must be unset, or the number of ranks that torchrun or srun has started \({}\), but is '{}'"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        # torchrun
        (TORCHRUN, OF_TORCHRUN),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "3"}, OF_TORCHRUN),
        (TORCHRUN | SRUN, OF_TORCHRUN),  # torchrun in a Slurm job
        (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "3", "PMI_SIZE": "3"}, OF_TORCHRUN),  # which mpirun started on each node
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "lmscale-77"}, World("lmscale", 6, 2, 3, 1, address=("a3", 29500))),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "lmscale-gpt"}, World("torchrun", 6, 2, 3, 1, address=("a3", 29500))),
        (
            TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"},
            World("torchrun", 6, 2, 3, 1, 1, 2, address=("a3", 29500)),
        ),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "", "TORCHELASTIC_MAX_RESTARTS": ""}, OF_TORCHRUN),
        # srun
        (SRUN, OF_SRUN),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "6"}, OF_SRUN),
        (SRUN | {"SLURM_CPUS_PER_TASK": "7"}, World("srun", 6, 2, 3, 1, num_cores=7, address=("a03", 19567))),
        (SRUN | {"SLURM_CPUS_PER_TASK": ""}, OF_SRUN),
        (SRUN | {"SLURM_NODELIST": "b"}, World("srun", 6, 2, 3, 1, address=("b", 19567))),
        (SRUN | {"SLURM_NODELIST": "b7,a[1-2]"}, World("srun", 6, 2, 3, 1, address=("b7", 19567))),
        (SRUN | {"SLURM_NODELIST": "r1-[2,4-5]-ib,b"}, World("srun", 6, 2, 3, 1, address=("r1-2-ib", 19567))),
        (SRUN | {"SLURM_NODELIST": "rack[1-2]n[01-08]"}, World("srun", 6, 2, 3, 1, address=("rack1n01", 19567))),
        (SRUN | {"SLURM_NODELIST": "r[3,5]n[2-4]x,b[1]"}, World("srun", 6, 2, 3, 1, address=("r3n2x", 19567))),
        (SRUN | STEP_ON_SOME_NODES, OF_SRUN),
        (
            SRUN | STEP_ON_SOME_NODES | {"SLURM_STEP_NODELIST": "a[04-06]"},
            World("srun", 6, 2, 3, 1, address=("a04", 19567)),
        ),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "4"}, World("srun", 6, 2, 3, 1, address=("b", 4))),
        (SRUN | {"MASTER_ADDR": "", "MASTER_PORT": ""}, OF_SRUN),
        (SRUN | {"WORLD_SIZE": "6", "RANK": "5", "LOCAL_RANK": "0"}, OF_SRUN),  # a batch script that exports them
        (SRUN | {"PMI_SIZE": "6", "PMI_RANK": "3"}, OF_SRUN),  # srun --mpi=pmi2
        (SRUN | {"TORCHELASTIC_RUN_ID": ""}, OF_SRUN),
        # no several ranks
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        (SRUN | {"SLURM_NTASKS": ""}, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # the shell of salloc, which has the job's SLURM_NTASKS
        (BATCH | {"SLURM_JOB_NAME": "bash"}, None),
        (BATCH | {"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "x"}, None),
        (BATCH | {"SLURM_NTASKS": "1"}, None),
        (BATCH | {"SLURM_NTASKS": ""}, None),  # unset to start the ranks in the batch script
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"}, None),  # salloc on a login node
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_PROCID": ""}, None),
        # left over
        ({"LOCAL_RANK": "1"}, None),
        ({"RANK": "x", "LOCAL_RANK": "", "NODE_RANK": "2", "GROUP_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": ""}, None),
        ({"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3"}, None),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "x", "TORCHELASTIC_RESTART_COUNT": "3"}, None),
        ({"PL_GLOBAL_SEED": "4", "PL_TRAINER_DEVICES": ""}, None),
        # refused
        (TORCHRUN | {"WORLD_SIZE": ""}, f"^`WORLD_SIZE` {MISSING}"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": ""}, f"^`LOCAL_WORLD_SIZE` {MISSING}"),
        (TORCHRUN | {"RANK": ""}, f"^`RANK` {MISSING}"),
        (TORCHRUN | {"LOCAL_RANK": ""}, f"^`LOCAL_RANK` {MISSING}"),
        (TORCHRUN | {"MASTER_ADDR": ""}, f"^`MASTER_ADDR` {MISSING}"),
        (TORCHRUN | {"MASTER_PORT": ""}, f"^`MASTER_PORT` {MISSING}"),
        ({"TORCHELASTIC_RUN_ID": "left over"}, f"^`WORLD_SIZE` {MISSING}"),
        (TORCHRUN | {"WORLD_SIZE": "six"}, f"^`WORLD_SIZE` {NUMBER} 'six'$"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, r"^`WORLD_SIZE` must be a multiple of `LOCAL_WORLD_SIZE` \(2\), .* but is 0$"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, r"^`WORLD_SIZE` must be a multiple of `LOCAL_WORLD_SIZE` \(0\)"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, r"^`WORLD_SIZE` must be a multiple of `LOCAL_WORLD_SIZE` \(4\)"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "4"}, r"^`WORLD_SIZE` must be .* \(2 x 4\), because every node .* but is 6$"),
        (TORCHRUN | {"RANK": "6"}, r"^`RANK` must be below `WORLD_SIZE` \(6\), but is 6$"),
        (TORCHRUN | {"RANK": "-1"}, f"^`RANK` {NUMBER} '-1'$"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, r"^`LOCAL_RANK` must be below `LOCAL_WORLD_SIZE` \(2\), but is 2$"),
        (TORCHRUN | {"MASTER_PORT": "x"}, f"^`MASTER_PORT` {NUMBER} 'x'$"),
        (BATCH, "^the 6 tasks of a Slurm job must be started by srun, .*: put srun before python, or unset SLURM_NT"),
        (BATCH | {"SLURM_STEP_ID": ""}, "^the 6 tasks of a Slurm job must be started by srun"),
        (SRUN | {"SLURM_NTASKS": "six"}, f"^`SLURM_NTASKS` {NUMBER} 'six'$"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "six"}, f"^`SLURM_STEP_NUM_TASKS` {NUMBER} 'six'$"),
        (SRUN | {"SLURM_NTASKS_PER_NODE": ""}, "^`srun` must have `--ntasks-per-node`, but has 6 tasks without it$"),
        (SRUN | {"SLURM_NTASKS_PER_NODE": "4"}, r"its nodes x `--ntasks-per-node` \(3 x 4\), but are 6$"),
        (SRUN | {"SLURM_NNODES": ""}, r"its nodes x `--ntasks-per-node` \(1 x 2\), but are 6$"),
        (SRUN | {"SLURM_PROCID": "x"}, f"^`SLURM_PROCID` {NUMBER} 'x'$"),
        (SRUN | {"SLURM_PROCID": "6"}, r"^`SLURM_PROCID` must be below `SLURM_NTASKS` \(6\), but is 6$"),
        (SRUN | {"SLURM_LOCALID": ""}, "^`SLURM_LOCALID` must be set where SLURM_PROCID is, but is not"),
        (SRUN | {"SLURM_LOCALID": "2"}, r"^`SLURM_LOCALID` must be below `--ntasks-per-node` \(2\), but is 2$"),
        (SRUN | {"SLURM_LOCALID": "0"}, f"^`SLURM_LOCALID` must be 1, {CONSECUTIVE}, but is 0$"),  # cyclic
        (SRUN | {"SLURM_NODELIST": ""}, "^`SLURM_NODELIST` must be set where SLURM_PROCID is, but is not"),
        (SRUN | {"MASTER_ADDR": "[fd00::2]"}, r"^`MASTER_ADDR` must be .* without brackets, but is \[fd00::2\]$"),
        (TORCHRUN | {"MASTER_ADDR": "[::1]"}, r"^`MASTER_ADDR` must be .* without brackets, but is \[::1\]$"),
        (SRUN | {"MASTER_PORT": "x"}, f"^`MASTER_PORT` {NUMBER} 'x'$"),
        (SRUN | {"MASTER_PORT": "99999999"}, f"^`MASTER_PORT` {PORT} 99999999$"),
        (SRUN | {"MASTER_PORT": "0"}, f"^`MASTER_PORT` {PORT} 0$"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, f"^`MASTER_PORT` {PORT} 65536$"),
        (SRUN | {"WORLD_SIZE": "8"}, f"^`WORLD_SIZE` {FOREIGN.format(6, 8)}"),
        ({"WORLD_SIZE": "8"}, f"^`WORLD_SIZE` {FOREIGN.format(1, 8)}"),  # DeepSpeed's launcher, or left over
        ({"WORLD_SIZE": "x"}, f"^`WORLD_SIZE` {FOREIGN.format(1, 'x')}"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, f"^`OMPI_COMM_WORLD_SIZE` {FOREIGN.format(1, 4)}"),  # mpirun -n 4
        (SRUN | {"OMPI_COMM_WORLD_SIZE": "48"}, f"^`OMPI_COMM_WORLD_SIZE` {FOREIGN.format(6, 48)}"),  # in a Slurm job
        ({"PMI_SIZE": "4"}, f"^`PMI_SIZE` {FOREIGN.format(1, 4)}"),
        ({"PL_TRAINER_LIMIT_VAL_BATCHES": "1"}, "^`PL_TRAINER_LIMIT_VAL_BATCHES` must be unset, .* but is '1'$"),
        (TORCHRUN | {"PL_TRAINER_MAX_STEPS": "1"}, "^`PL_TRAINER_MAX_STEPS` must be unset"),
    ],
)
def test_the_variables_that_count(monkeypatch, variables: dict[str, str], expected: World | str | None) -> None:
    monkeypatch.setattr(os, "environ", variables)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            world_from_outside()
    else:
        assert world_from_outside() == expected
        assert is_first_rank() is (expected is None)


@pytest.mark.parametrize("rank", ["0", "5"])
@pytest.mark.parametrize(("variables", "name"), [(TORCHRUN, "RANK"), (SRUN, "SLURM_PROCID")])
def test_the_first_rank_has_number_0(monkeypatch, variables, name, rank) -> None:
    monkeypatch.setattr(os, "environ", variables | {name: rank, "SLURM_LOCALID": str(int(rank) % 2)})
    assert is_first_rank() is (rank == "0")


@pytest.mark.parametrize(("count", "expected"), [(None, False), ("", False), ("0", False), ("1", True), ("12", True)])
def test_a_requeued_job(monkeypatch, count, expected) -> None:
    monkeypatch.setattr(os, "environ", {} if count is None else {"SLURM_RESTART_COUNT": count})
    assert was_requeued() is expected


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, None),  # alone, as torch decides
        (TORCHRUN, 6),
        (SRUN | {"SLURM_CPUS_PER_TASK": "5"}, 5),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "6"}, 2),
        (TORCHRUN | {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "64"}, 1),
        (TORCHRUN | {COMPILE_WORKERS: "9"}, 9),
    ],
    ids=["alone", "shared", "of srun", "six ranks", "more ranks than cores", "the user's"],
)
def test_the_ranks_of_a_host_share_its_cores_among_their_compile_workers(monkeypatch, variables, workers) -> None:
    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(world, "usable_cores", lambda: 12)
    world.join_ranks()
    assert os.environ.get(COMPILE_WORKERS) == (None if workers is None else str(workers))


@pytest.mark.slow  # three interpreters import torch and Lightning
def test_torch_reads_the_number_of_workers_in_the_ranks_that_the_launcher_starts(tmp_path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "worker.py").write_text(
        "import torch._inductor.config as inductor\n"
        "def number(job): print('workers', inductor.compile_threads, flush=True); return 0\n"
    )
    code = (
        "import os\n"
        "from lmscale.runtime import world\n"
        "from lmscale.runtime.launch import launch\n"
        "from worker import number\n"
        "world.usable_cores = lambda: 6\n"
        "if __name__ == '__main__':\n"
        "    launch(number, None, 2)\n"
        "    print('left', world.COMPILE_WORKERS in os.environ)\n"
    )
    (tmp_path / "start.py").write_text(code)
    kept = {name: value for name, value in os.environ.items() if name != COMPILE_WORKERS}
    command, kept["PYTHONPATH"] = [sys.executable, str(tmp_path / "start.py")], f"{REPOSITORY / 'src'}:{tmp_path}"
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == ["left False", "workers 3", "workers 3"], done.stderr
