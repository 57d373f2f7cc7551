"""A norm placement is one class: a third one, added here, is built, counted, trained and sharded."""

import inspect
from pathlib import Path

import pytest
from runs import read_rows, run_jobs, tiny_run
from sharding import small_config

from lmscale.models import build_model
from lmscale.models.later_placements import PLACEMENTS
from lmscale.models.norm_placement import NormPlacement
from lmscale.parallel import ParallelContext


class Sandwich(NormPlacement):
    """LayerNorm before and after each sublayer, after the embeddings and after the stack."""

    before = ("norm",)
    after = ("output_norm",)
    after_embedding = True
    after_stack = True
    eps = 1e-6

    def residual(self, x, sublayer, norm, output_norm):
        """x + output_norm(sublayer(norm(x)))."""
        return x + output_norm(sublayer(norm(x)))

    def residual_std(self, config):
        """The deviation of the other weights, because the output is normalized."""
        return config.initializer_std


def register(rank: int) -> None:
    """As a line in `later_placements.py` would, on a rank."""
    PLACEMENTS["sandwich"] = Sandwich()


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    monkeypatch.setitem(PLACEMENTS, "sandwich", Sandwich())


def test_a_placement_costs_at_most_30_lines() -> None:
    for placement in PLACEMENTS.values():
        assert len(inspect.getsource(type(placement)).splitlines()) <= 30


def test_a_run_is_the_same_at_both_tensor_sizes(tmp_path: Path) -> None:
    for tp_size in (1, 2):
        run = tiny_run("gpt", tmp_path / str(tp_size), model__norm_order="sandwich", parallel__tp_size=tp_size)
        run_jobs([run], tp_size, fault=register)
    one, two = (read_rows(tmp_path / str(tp_size)) for tp_size in (1, 2))
    assert [row["train/loss"] for row in two] == pytest.approx([row["train/loss"] for row in one], rel=1e-12)


@pytest.mark.parametrize("norm_order, outer", [("pre", "final_norm"), ("post", "embedding_norm")])
def test_names_and_order_of_the_papers_parameters_are_unchanged(norm_order: str, outer: str) -> None:
    transformer = build_model(small_config("gpt", norm_order=norm_order), ParallelContext(), seed=1).transformer
    assert [name for name, _ in transformer.layers[0].named_children()] == [
        "attention_norm",
        "attention",
        "mlp_norm",
        "mlp",
    ]
    assert {name for name, _ in transformer.named_children()} == {"word_embedding", "layers", outer}


def test_an_unknown_placement_is_refused_with_the_known_ones() -> None:
    known = ", ".join(PLACEMENTS)
    with pytest.raises(ValueError, match=f"`norm_order` must be one of {known}, but is 'middle'"):
        small_config("gpt", norm_order="middle")
