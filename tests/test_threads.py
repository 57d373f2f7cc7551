"""How many CPU threads a rank has, and what decided it."""

import os

import pytest
import torch

from lmscale.threads import share_cores

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
    ],
)
def test_the_configuration_precedes_the_environment_and_that_precedes_the_share(
    monkeypatch, variables, local_size, requested, expected
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        assert share_cores(local_size, requested) == expected
        assert torch.get_num_threads() == expected[0]
    finally:
        torch.set_num_threads(before)
