"""The optimizer's step on a GPU, without one: no host sync, and the launches and bytes of its kernels.

Not covered: the time of the kernels, streams, and NCCL.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import fake_gpu  # noqa: E402

pytestmark = pytest.mark.skipif(fake_gpu.problem() is not None, reason=str(fake_gpu.problem()))
CUT = {"tp_size": 2, "sequence_parallel": True}
ZERO1 = {"dp_size": 2, "zero1": True}


@pytest.fixture(scope="module")
def guard(tmp_path_factory) -> Path:
    return fake_gpu.build_guard(tmp_path_factory.mktemp("guard"))


def take_steps(guard: Path, **case: object) -> dict:
    command = [sys.executable, str(HERE / "optimizer_step.py"), str(guard), json.dumps(case)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_the_host_never_waits(found: dict) -> None:
    assert (found["syncs"], found["mixed"]) == ({}, {})
    assert found["copies"] == {"copy_": 1}  # the counters, to pinned memory, read when the next step has been queued


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "moments", "layout"),
    [("fp16", "fp32", {}), ("bf16", "bf16", CUT), ("fp32", "fp32", ZERO1)],
)
def test_a_step_has_no_host_sync(guard, dtype, moments, layout) -> None:
    found = take_steps(guard, dtype=dtype, moments=moments, compiles=False, **layout)
    assert_the_host_never_waits(found)


# Bytes per parameter: gradient, master and moments are read, master, moments and half-type weight written. The norm
# reads the gradient once more.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "moments", "layout", "num_bytes"),
    [
        ("bf16", "fp32", ZERO1, 4 + 4 + 8 + 4 + 8 + 2),
        ("fp16", "bf16", CUT, 4 + 4 + 4 + 4 + 4 + 2),
        ("fp32", "fp32", {}, 4 + 4 + 8 + 4 + 8),
    ],
)
def test_the_update_of_a_tensor_is_one_kernel_that_moves_every_byte_once(
    guard, dtype, moments, layout, num_bytes
) -> None:
    found = take_steps(guard, dtype=dtype, moments=moments, compiles=True, **layout)
    assert_the_host_never_waits(found)
    assert found["graphs_after_step"][0] == found["graphs_after_step"][1]  # the second step compiles nothing
    counters, *updates = found["graphs"]
    assert len(counters) == 3 and {len(calls) for calls in updates} == {1}
    assert len(updates) <= 4  # of matrices and vectors, as they lie in their buffer
    assert {found["bytes"][calls[0]] for calls in updates} == {num_bytes}
    assert len(found["cubins"]) == len({call for calls in found["graphs"] for call in calls})
    assert found["compiled_calls"] == {"advance": 1, "adamw": found["num_updated"]}
    assert sum(found["eager_launches"].values()) <= 27  # the norm; with ZeRO-1 also the weights from their owners
