"""The code that torch.compile generates for a layer on a GPU, checked without a GPU.

Not covered: NCCL, streams, CUDA graphs, the allocator, and which attention kernel a GPU chooses (flash is assumed).
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
FLASH = "torch.ops.aten._scaled_dot_product_flash_attention.default"


@pytest.fixture(scope="module")
def guard(tmp_path_factory) -> Path:
    return fake_gpu.build_guard(tmp_path_factory.mktemp("guard"))


def compile_layer(guard: Path, **case: object) -> dict:
    command = [sys.executable, str(HERE / "compiled_layer.py"), str(guard), json.dumps(case)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def flash_forwards(found: dict) -> int:
    return [call for calls in found["calls"] for call in calls].count(FLASH)


def test_every_kernel_of_a_sequence_parallel_rank_compiles_for_a_gpu(guard) -> None:
    found = compile_layer(guard, tp_size=2, tp_rank=1, sequence_parallel=True)
    assert found["refused"] == {}
    assert len(found["cubins"]) >= 5 and all(size > 0 for sizes in found["cubins"].values() for size in sizes)


def test_every_kernel_of_exact_attention_on_the_last_rank_compiles_for_a_gpu(guard) -> None:
    found = compile_layer(guard, tp_size=4, tp_rank=3, model={"attention": "exact"})
    assert found["refused"] == {}
    assert flash_forwards(found) == 0


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_attention_dropout_reads_the_generator_at_every_step(guard, recompute) -> None:
    # A generator cloned by AOTAutograd is seeded once, when the graph is made. Our seeding per step would not reach it,
    # and a resumed run would draw different masks than the uninterrupted one.
    found = compile_layer(guard, model={"recompute": recompute, "attention_dropout": 0.1})
    assert found["cloned_generators"] == []
    assert flash_forwards(found) == 1
    assert (found["graphs"], found["breaks"], found["refused"]) == (2, 0, {})
