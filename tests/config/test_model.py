"""A model's config from YAML, where the vocabulary and the recomputation mode are still open, to one that is built."""

import dataclasses

import pytest

from lmscale.config import Recompute, TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext

OPEN = TransformerConfig("gpt", 1, 8, 2, None, 16, vocab_multiple=8, recompute="auto", name="tiny")


def test_a_config_that_leaves_something_open_is_resolved_once_and_then_built() -> None:
    for unresolved in (OPEN, OPEN.with_vocab_size(9), OPEN.with_recompute(Recompute.NONE)):
        with pytest.raises(ValueError, match="before a model is built"):
            build_model(unresolved, ParallelContext(), seed=1)
    resolved = OPEN.with_vocab_size(9).with_recompute(Recompute.FULL)
    assert (resolved.padded_vocab_size, resolved.recompute) == (16, Recompute.FULL)
    assert resolved.with_vocab_size(7).with_recompute(Recompute.NONE) == resolved
    build_model(resolved, ParallelContext(), seed=1)


def test_a_name_makes_no_difference_and_is_not_in_a_checkpoint() -> None:
    assert dataclasses.replace(OPEN, name="other") == OPEN
    assert "name" not in OPEN.to_dict()
    assert TransformerConfig.from_dict(OPEN.to_dict()) == OPEN
