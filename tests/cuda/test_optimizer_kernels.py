"""The optimizer's step on a GPU, without one: no host sync, and the launches and bytes of its kernels.

Not covered: the time of the kernels, streams, and NCCL.
"""

from pathlib import Path

import fake_gpu
import pytest

pytestmark = pytest.mark.slow
CUT = {"tp_size": 2, "sequence_parallel": True}
ZERO1 = {"dp_size": 2, "zero1": True}


def take_steps(guard: Path, **case: object) -> dict:
    return fake_gpu.run("optimizer_step.py", guard, case)


def assert_the_host_never_waits(found: dict) -> None:
    assert (found["syncs"], found["mixed"]) == ({}, {})
    assert found["copies"] == {"copy_": 1}  # the counters, to pinned memory, read when the next step has been queued


@pytest.mark.parametrize(
    ("dtype", "moments", "layout"),
    [("fp16", "fp32", {}), ("bf16", "bf16", CUT), ("fp32", "fp32", ZERO1)],
)
def test_a_step_has_no_host_sync(guard, dtype, moments, layout) -> None:
    found = take_steps(guard, dtype=dtype, moments=moments, compiles=False, **layout)
    assert_the_host_never_waits(found)


# Bytes per parameter: gradient, master and moments are read, master, moments and half-type weight written. The norm
# reads the gradient once more; the tables have 4 to 12 bytes per 128 parameters.
@pytest.mark.parametrize(
    ("dtype", "moments", "layout", "num_bytes"),
    [
        ("bf16", "fp32", ZERO1, 4 + 4 + 8 + 4 + 8 + 2),
        ("fp16", "bf16", CUT, 4 + 4 + 4 + 4 + 4 + 2),
        ("fp32", "fp32", {"dp_size": 2}, 4 + 4 + 8 + 4 + 8),
    ],
)
def test_the_update_of_all_tensors_is_one_kernel_that_moves_every_byte_once(
    guard, dtype, moments, layout, num_bytes
) -> None:
    found = take_steps(guard, dtype=dtype, moments=moments, compiles=True, **layout)
    assert_the_host_never_waits(found)
    assert found["graphs_after_step"][0] == found["graphs_after_step"][1]  # the second step compiles nothing
    counters, (update,) = found["graphs"]
    assert len(counters) == 3 and found["bytes"][update] == num_bytes
    assert len(found["cubins"]) == len({call for calls in found["graphs"] for call in calls})
    assert found["compiled_calls"] == {"advance": 1, "adamw": 1}
    # The norm, 5 numbers of each of 2 groups; with ZeRO-1 also the gathering of the weights.
    assert sum(found["eager_launches"].values()) <= 37
