"""What is set in a process that computes on a CPU."""

import ctypes
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
import torch
from lmscale.training.runtime.cpu_settings import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

mapped = [faults(), faults()]
assert keep_freed_memory()
first, second = faults(), faults()
print(min(*mapped, first), second)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="Linux with glibc alone has mallopt"
)
def test_a_tensor_reuses_the_memory_of_the_one_before() -> None:
    command = [sys.executable, "-c", COUNT_FAULTS]  # in a process of its own: the setting cannot be taken back
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    fresh, reused = map(int, done.stdout.split())
    assert reused < fresh / 3  # 2 of 16,387 with pages of 4 KiB
