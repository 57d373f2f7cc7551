"""The device guard of the simulated GPU, compiled once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_gpu  # noqa: E402


@pytest.fixture(scope="session")
def guard(tmp_path_factory) -> Path:
    """The compiled `guard.cpp`; skips the test where no GPU can be simulated."""
    if fake_gpu.problem() is not None:
        pytest.skip(fake_gpu.problem())
    return fake_gpu.build_guard(tmp_path_factory.mktemp("guard"))
