"""The reference of keys is complete and current."""

import subprocess
import sys

import pytest

from lmscale.config.reference import ENTRY_POINTS, REFERENCE, format_reference, groups, keys


@pytest.mark.parametrize("script", ENTRY_POINTS)
def test_every_key_has_a_line_of_documentation(script: str) -> None:
    rows = [row for _, cls in groups(ENTRY_POINTS[script]) for row in keys(cls)]  # a field without one raises
    assert rows and all(meaning for *_, meaning in rows)


def test_the_committed_reference_is_current() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == format_reference(), "make reference"


def test_writing_the_reference_imports_no_torch() -> None:
    code = "import sys, lmscale.config.reference; assert not {'torch', 'hydra', 'omegaconf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
