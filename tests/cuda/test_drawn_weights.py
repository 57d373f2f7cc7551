"""Initial weights drawn by counter have the same bits on a GPU as on a CPU."""

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


def test_the_kernel_for_a_gpu_draws_the_bits_of_a_cpu(tmp_path) -> None:
    guard = fake_gpu.build_guard(tmp_path)
    command = [sys.executable, str(HERE / "drawn_weights.py"), str(guard)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"torch.float32": True, "torch.float16": True}
