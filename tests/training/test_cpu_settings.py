"""The heap of a process that computes on a CPU, and the types that it is slow with."""

import subprocess
import sys

import pytest

from lmscale.training.runtime import cpu_settings

MEASURE = """
import resource, sys
import torch
from lmscale.training.runtime.cpu_settings import keep_heap

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

if sys.argv[1] == "keep":
    keep_heap()
for num_mib in (24, 64):
    before = resident_mib()
    tensors = [torch.ones(num_mib, 2**18) for _ in range(6)]
    del tensors
    print(resident_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
@pytest.mark.parametrize(
    "mode, bounds", [("keep", (120, 160)), pytest.param("default", (-16, 40), marks=pytest.mark.slow)]
)
def test_the_heap_keeps_tensors_of_24_mib_and_returns_those_of_64(mode: str, bounds: tuple[int, int]) -> None:
    """MiB of 6 x 24 and of 6 x 64 that stay after they are freed."""
    done = subprocess.run([sys.executable, "-c", MEASURE, mode], capture_output=True, text=True, check=True)
    small, large = map(float, done.stdout.split())
    assert bounds[0] < small < bounds[1]
    assert large < 16


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ({"avx2"}, {"bf16", "fp16"}),
        ({"avx2", "amx_bf16"}, {"fp16"}),
        ({"avx512_bf16", "avx512_fp16"}, set()),
        (set(), set()),
    ],
)
def test_half_types_without_instructions_are_named(monkeypatch, flags, slow) -> None:
    monkeypatch.setattr(cpu_settings, "cpu_flags", lambda: flags)
    assert {dtype for dtype in ("fp64", "fp32", "bf16", "fp16") if cpu_settings.describe_slow_type(dtype)} == slow
