"""A norm placement is one class: a third one, added here, is built, counted, trained and sharded."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from ranks import make_context, run_ranks
from runs import read_rows, run_jobs, tiny_run
from sharding import differences_from_plain, random_model, small_config

from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.models.later_placements import PLACEMENTS
from lmscale.models.norm_placement import NormPlacement
from lmscale.parallel import ParallelContext
from lmscale.planner.communication import replicated_parameters
from lmscale.planner.params import count_parameters, rank_parameters


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


def sandwich(**changes) -> TransformerConfig:
    return small_config("bert", norm_order="sandwich", max_position_embeddings=12, **changes)


def test_a_placement_costs_at_most_30_lines() -> None:
    for placement in PLACEMENTS.values():
        assert len(inspect.getsource(type(placement)).splitlines()) <= 30


def test_a_layer_applies_the_placement_to_both_sublayers() -> None:
    layer = random_model(sandwich(), ParallelContext()).transformer.layers[0]
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = x + layer.attention_output_norm(layer.attention(layer.attention_norm(x), None, None))
    y = y + layer.mlp_output_norm(layer.mlp(layer.mlp_norm(y)))
    assert torch.equal(layer(x, None, None), y)
    assert layer.mlp_norm.eps == 1e-6
    assert layer.mlp.down.weight.shard.std == layer.mlp.up.weight.shard.std


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_planner_counts_its_parameters(tp_size: int) -> None:
    config = sandwich()
    model = build_model(config, ParallelContext(tp_size=tp_size), seed=None, device="meta")
    sizes = [param.numel() for param in model.parameters()]
    layout = Layout(tp_size=tp_size)
    assert count_parameters(config, layout).per_rank == sum(sizes)
    assert sorted(each.size for each in rank_parameters(config, layout)) == sorted(sizes)
    context = ParallelContext(tp_size=2, sequence_parallel=True)
    model = build_model(config, context, seed=None, device="meta")
    expected = sum(p.numel() for p in model.parameters() if p.shard.replicated)
    assert replicated_parameters(config, Layout()) == [expected]


def _differences(rank: int) -> dict[str, float]:
    register(rank)
    return differences_from_plain(sandwich(hidden_dropout=0.2), make_context(tp_size=2))


def test_two_tensor_ranks_equal_one_process() -> None:
    for found in run_ranks(_differences, 2):
        assert max(found.values()) < 1e-12, found


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


def test_the_placements_import_no_torch() -> None:
    source = (Path(inspect.getfile(NormPlacement))).read_text(encoding="utf-8")
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert modules == {"math", "abc", "collections.abc", "typing"}
