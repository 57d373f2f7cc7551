"""A folder for the input files of a test."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "input"
    path.mkdir()
    return path
