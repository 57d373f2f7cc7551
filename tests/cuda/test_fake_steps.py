"""A training step on fake CUDA tensors: no operation mixes devices, and the host does not wait for the device.

Not covered: CUDA graphs, Lightning's own Trainer, and its callbacks
except the replica check.
"""

import fake_gpu
import pytest
from fake_step import ALLOWED_SYNCS, FACTORS, problems_of
from pairwise import pairwise

CASES = pairwise(FACTORS)


@pytest.fixture(scope="module")
def steps(guard) -> list[dict]:
    return fake_gpu.run("fake_step.py", guard, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case.values())) for case in CASES])
def test_a_step_stays_on_the_device(steps, number) -> None:
    assert problems_of(steps[number]) == []


@pytest.mark.slow
def test_every_allowed_sync_still_happens(steps) -> None:
    happened = {tuple(sync) for step in steps for sync in step["syncs"]}
    assert set(ALLOWED_SYNCS) - happened == set(), "delete the entry"
