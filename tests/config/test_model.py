"""A model config from YAML, with vocabulary and recomputation unresolved, to the config that is built."""

import dataclasses

import pytest

from lmscale.config import Recompute, TransformerConfig
from lmscale.config.model import ModelConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext

OPEN = ModelConfig("gpt", 1, 8, 2, None, 16, vocab_multiple=8, recompute="auto", attention="auto", name="tiny")


def test_an_unresolved_config_is_resolved_once_and_then_built() -> None:
    for unresolved in ((None, "exact", Recompute.NONE), (9, "auto", Recompute.NONE), (9, "exact", "auto")):
        with pytest.raises(ValueError, match="must be .*, but is '?(null|auto)"):
            OPEN.resolve(*unresolved)
    resolved = OPEN.resolve(9, "exact", Recompute.FULL)
    assert (resolved.padded_vocab_size, resolved.recompute, resolved.attention) == (16, Recompute.FULL, "exact")
    assert resolved.resolve(7, "sdpa", Recompute.NONE) == resolved
    build_model(resolved, ParallelContext(), seed=1)


@pytest.mark.parametrize("name", ["initializer_std", "layer_norm_eps"])
def test_an_infinite_number_is_refused(name) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be .*finite number.*, but is inf"):
        dataclasses.replace(OPEN, **{name: float("inf")})


def test_a_models_name_is_ignored_and_not_in_checkpoints() -> None:
    assert dataclasses.replace(OPEN, name="other") == OPEN
    assert "name" not in OPEN.to_dict()
    resolved = OPEN.resolve(9)
    assert TransformerConfig.from_dict(resolved.to_dict()) == resolved
