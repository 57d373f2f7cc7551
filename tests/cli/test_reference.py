"""The reference of keys is complete and current."""

import pytest

from lmscale.cli.reference import ENTRY_POINTS, REFERENCE, composed, format_reference, groups, keys
from lmscale.config import TransformerConfig


@pytest.mark.parametrize("script", ENTRY_POINTS)
def test_every_key_has_a_line_of_documentation(script: str) -> None:
    conf = composed(script)
    rows = [row for prefix, cls in groups(ENTRY_POINTS[script]) for row in keys(cls, prefix, conf)]  # or it raises
    assert rows and all(meaning for *_, meaning in rows)


def test_a_default_is_that_of_the_command_and_not_of_the_dataclass() -> None:
    defaults = {name: default for name, _, default, _ in keys(TransformerConfig, "model.", composed("src/train.py"))}
    assert (defaults["model.attention"], defaults["model.recompute"]) == ("`auto`", "`auto`")
    assert defaults["model.num_layers"] == "-"  # of the chosen model


def test_the_committed_reference_is_current() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == format_reference(), "make reference"
