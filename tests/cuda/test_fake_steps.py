"""A training step on fake CUDA tensors: no operation mixes devices, and the host does not wait for the device.

Not covered: CUDA graphs, Lightning's own Trainer, and its callbacks
except the replica check.
"""

import fake_gpu
import pytest
from fake_step import ALLOWED_SYNCS, FACTORS, problems_of
from pairwise import pairs_of, pairwise

CASES = pairwise(FACTORS)
FEW = CASES[6::12]


@pytest.fixture(scope="module")
def steps(guard) -> list[dict]:
    return fake_gpu.run("fake_step.py", guard, CASES)


def test_every_two_settings_meet_in_a_case() -> None:
    missing = [pair for pair in pairs_of(FACTORS) if not any(dict(pair).items() <= case.items() for case in CASES)]
    assert missing == []
    assert len(CASES) <= 60


@pytest.mark.slow
def test_a_few_steps_stay_on_the_device(guard) -> None:
    assert {case["family"] for case in FEW} == {"gpt", "bert"}
    assert [problems_of(step) for step in fake_gpu.run("fake_step.py", guard, FEW)] == [[]] * len(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case.values())) for case in CASES])
def test_a_step_stays_on_the_device(steps, number) -> None:
    assert problems_of(steps[number]) == []


@pytest.mark.slow
def test_every_allowed_sync_still_happens(steps) -> None:
    happened = {tuple(sync) for step in steps for sync in step["syncs"]}
    assert set(ALLOWED_SYNCS) - happened == set(), "delete the entry"
