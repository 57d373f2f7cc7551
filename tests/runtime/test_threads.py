"""How many CPU threads a rank has, and what decided it."""

import os

import lightning as L
import pytest
import torch
from entry_points import slurm_task
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lmscale.runtime.cpu_settings import share_cores
from lmscale.training.strategy import TensorParallelStrategy

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
SHARE = (CORES, f"an equal share of {CORES} cores")


def torchrun(run_id: str, local_size: int) -> dict[str, str]:
    """The variables of one rank of torchrun, or of our own agent."""
    names = {"WORLD_SIZE": local_size, "LOCAL_WORLD_SIZE": local_size, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}
    return {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": run_id, "MASTER_ADDR": "a"}


def tasks(number: int, cores: str) -> dict[str, str]:
    """The variables of a task of `srun` on one host."""
    number = {"SLURM_NTASKS": str(number), "SLURM_NTASKS_PER_NODE": str(number)}
    return slurm_task(0, "29500") | number | {"SLURM_CPUS_PER_TASK": cores}


@pytest.mark.parametrize(
    ("variables", "requested", "expected"),
    [
        ({}, None, SHARE),
        ({"OMP_NUM_THREADS": "3"}, None, (3, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "5,2"} | torchrun("none", 2), None, (5, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "3"}, 2, (2, "trainer.num_threads")),
        ({"OMP_NUM_THREADS": "0"}, None, SHARE),
        ({"OMP_NUM_THREADS": "1"} | torchrun("none", 1), None, (1, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "1"} | torchrun("lmscale-7", 2), None, (1, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "1"} | torchrun("none", max(2, CORES)), None, (1, SHARE[1])),
        (tasks(2, "1"), None, (1, "--cpus-per-task")),
        (tasks(2, "9999"), None, (CORES, "--cpus-per-task")),  # the task's own cores
        (tasks(max(2, CORES), ""), None, (1, SHARE[1])),
        (tasks(1, "9999"), None, SHARE),
        ({"SLURM_CPUS_PER_TASK": "9999", "SLURM_NTASKS": "2"}, None, SHARE),
        ({"SLURM_CPUS_PER_TASK": "9999"} | torchrun("lmscale-7", max(2, CORES)), None, (1, SHARE[1])),
    ],
    ids=[
        "share",
        "set",
        "per level",
        "requested",
        "not a number of threads",
        "alone",
        "our launcher",
        "torchrun's own",
        "srun, not bound",
        "srun, bound",
        "srun, not told",
        "one task",
        "left over",
        "our launcher in one task",
    ],
)
def test_the_configuration_precedes_the_environment_and_that_precedes_the_share(
    monkeypatch, variables, requested, expected
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    before = torch.get_num_threads()
    try:
        assert share_cores(requested) == expected
        assert torch.get_num_threads() == expected[0]
    finally:
        torch.set_num_threads(before)


class OwnRanks(LightningEnvironment):
    """The environment of a script whose ranks Lightning starts."""

    creates_processes_externally = False


def test_lightning_sets_no_threads_on_ranks_that_exist_already(monkeypatch) -> None:
    """Its launcher would: after `trainer.num_threads` has been set, if OMP_NUM_THREADS is not."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for environment, has_launcher in ((TorchElasticEnvironment(), False), (OwnRanks(), True)):
        settings = {"devices": 2, "accelerator": "cpu", "logger": False, "plugins": [environment]}
        trainer = L.Trainer(strategy=TensorParallelStrategy(tp_size=2), **settings)
        assert (trainer.strategy.launcher is not None) is has_launcher
