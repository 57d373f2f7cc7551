"""How many CPU threads a rank has, and what decided it."""

import os

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lmscale.threads import share_cores
from lmscale.training.strategy import TensorParallelStrategy

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
SHARE = (CORES, f"an equal share of {CORES} cores")


@pytest.mark.parametrize(
    ("variables", "local_size", "requested", "expected"),
    [
        ({}, 1, None, SHARE),
        ({"OMP_NUM_THREADS": "3"}, 1, None, (3, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "5,2"}, 2, None, (5, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "3"}, 1, 2, (2, "trainer.num_threads")),
        ({"OMP_NUM_THREADS": "0"}, 1, None, SHARE),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 1, None, (1, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "lmscale-7"}, 2, None, (1, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, max(2, CORES), None, (1, SHARE[1])),
        ({"SLURM_CPUS_PER_TASK": "1"}, 2, None, (1, "--cpus-per-task")),
        ({"SLURM_CPUS_PER_TASK": "9999"}, max(2, CORES), None, (CORES, "--cpus-per-task")),  # the task's own cores
        ({"SLURM_CPUS_PER_TASK": "9999"}, 1, None, SHARE),
        ({"SLURM_CPUS_PER_TASK": "9999", "TORCHELASTIC_RUN_ID": "lmscale-7"}, max(2, CORES), None, (1, SHARE[1])),
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
        "one task",
        "our launcher in one task",
    ],
)
def test_the_configuration_precedes_the_environment_and_that_precedes_the_share(
    monkeypatch, variables, local_size, requested, expected
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        assert share_cores(local_size, requested) == expected
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
