"""DeepNorm, Peri-LN, B2T and Mix-LN: equal to plain torch modules, equal at every layout, planned and initialized."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ranks import make_context, run_ranks
from sharding import differences_from_plain, random_model, small_config
from torch import Tensor, nn

from lmscale.config import Layout, TransformerConfig
from lmscale.models import build_model
from lmscale.models.hugging_face import model_of
from lmscale.models.transformer import Transformer
from lmscale.parallel import ParallelContext
from lmscale.planner.params import stage_placements

LATER = ("deepnorm", "peri", "b2t", "mix")
HIDDEN, HEADS, LAYERS = 24, 4, 5  # a quarter of the layers, rounded down, is one


class Layer(nn.Module):
    """A layer of torch's modules; `norms` are by our names."""

    def __init__(self, names: list[str], eps: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norms = nn.ModuleDict({name: nn.LayerNorm(HIDDEN, eps) for name in names})

    def attend(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]

    def transform(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def pre(layer: Layer, x: Tensor) -> Tensor:
    x = x + layer.attend(layer.norms["attention_norm"](x))
    return x + layer.transform(layer.norms["mlp_norm"](x))


def post(layer: Layer, x: Tensor) -> Tensor:
    x = layer.norms["attention_norm"](x + layer.attend(x))
    return layer.norms["mlp_norm"](x + layer.transform(x))


def deepnorm(layer: Layer, x: Tensor) -> Tensor:
    alpha = 10**0.25  # (2 x 5 layers)^(1/4)
    x = layer.norms["attention_norm"](alpha * x + layer.attend(x))
    return layer.norms["mlp_norm"](alpha * x + layer.transform(x))


def peri(layer: Layer, x: Tensor) -> Tensor:
    norms = layer.norms
    x = x + norms["attention_output_norm"](layer.attend(norms["attention_norm"](x)))
    return x + norms["mlp_output_norm"](layer.transform(norms["mlp_norm"](x)))


def b2t(layer: Layer, x: Tensor) -> Tensor:
    y = layer.norms["attention_norm"](x + layer.attend(x))
    return layer.norms["mlp_norm"](y + x + layer.transform(y))


REFERENCES: dict[str, list[Callable]] = {
    "pre": [pre] * LAYERS,
    "post": [post] * LAYERS,
    "deepnorm": [deepnorm] * LAYERS,
    "peri": [peri] * LAYERS,
    "b2t": [b2t] * LAYERS,
    "mix": [post] + [pre] * (LAYERS - 1),
}
OUTER = {  # LayerNorms outside the layers
    "pre": {"final_norm"},
    "post": {"embedding_norm"},
    "deepnorm": {"embedding_norm"},
    "peri": {"embedding_norm", "final_norm"},
    "b2t": {"embedding_norm"},
    "mix": {"final_norm"},
}
EPS = {"post": 1e-12, "deepnorm": 1e-12, "b2t": 1e-12, "pre": 1e-5, "peri": 1e-5, "mix": 1e-5}


def config_of(name: str, **changes) -> TransformerConfig:
    return small_config("bert", norm_order=name, num_layers=LAYERS, **{"max_position_embeddings": 12} | changes)


def by_part(qkv: Tensor) -> Tensor:
    """Our rows [head, (q, k, v), d] in torch's order [(q, k, v), head, d]."""
    return qkv.view(HEADS, 3, HIDDEN // HEADS, -1).transpose(0, 1).reshape(qkv.shape)


def pairs(ours: Transformer, layers: list[Layer], outer: dict[str, nn.LayerNorm]) -> list[tuple]:
    """(our parameter, theirs, the view of ours that has the order of theirs)."""
    found = []
    for layer, theirs in zip(ours.layers, layers, strict=True):
        attention, module = layer.attention, theirs.attention
        found.append((attention.qkv.weight, module.in_proj_weight, by_part))
        found.append((attention.qkv.bias, module.in_proj_bias, by_part))
        same = [(attention.output, module.out_proj), (layer.mlp.up, theirs.up), (layer.mlp.down, theirs.down)]
        same += [(getattr(layer, name), norm) for name, norm in theirs.norms.items()]
        found += [(getattr(a, kind), getattr(b, kind), torch.clone) for a, b in same for kind in ("weight", "bias")]
    for name, norm in outer.items():
        module = getattr(ours, name)
        found += [(module.weight, norm.weight, torch.clone), (module.bias, norm.bias, torch.clone)]
    return found


@pytest.mark.parametrize("name", REFERENCES)
def test_forward_and_gradients_equal_those_of_torchs_modules(name: str) -> None:
    ours = random_model(config_of(name), ParallelContext()).transformer
    assert {n for n, _ in ours.named_children() if n.endswith("norm")} == OUTER[name]
    names = [n for n, _ in ours.layers[0].named_children() if n.endswith("norm")]
    layers = [Layer(names, EPS[name]).double() for _ in range(LAYERS)]
    outer = {n: nn.LayerNorm(HIDDEN, EPS[name]).double() for n in OUTER[name]}
    together = pairs(ours, layers, outer)
    with torch.no_grad():
        for mine, theirs, view in together:
            theirs.copy_(view(mine))
    tables = [p for n, p in ours.named_parameters() if "embedding" in n and "norm" not in n]
    assert len(together) + len(tables) == len(list(ours.parameters()))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(99, (3, 7), generator=generator)
    types = torch.randint(2, (3, 7), generator=generator)
    direction = torch.randn(3, 7, HIDDEN, dtype=torch.float64, generator=generator)

    found = ours(tokens, types)
    (found * direction).sum().backward()
    gradients = [p.grad for p in tables]
    for p in tables:
        p.grad = None
    x = ours.word_embedding.weight[tokens] + ours.position_embedding[:7] + ours.token_type_embedding[types]
    x = outer["embedding_norm"](x) if "embedding_norm" in outer else x
    for layer, apply in zip(layers, REFERENCES[name], strict=True):
        x = apply(layer, x)
    x = outer["final_norm"](x) if "final_norm" in outer else x
    (x * direction).sum().backward()

    assert (found - x).abs().max() < 1e-12 * x.abs().max()
    compared = [(view(mine.grad), theirs.grad) for mine, theirs, view in together]
    compared += list(zip(gradients, (p.grad for p in tables), strict=True))
    for mine, theirs in compared:
        assert (mine - theirs).abs().max() < 1e-12 * max(p.grad.abs().max() for p in ours.parameters())


def test_a_quarter_of_the_layers_of_mix_is_post_norm() -> None:
    for num_layers, num_post in ((3, 0), (4, 1), (12, 3), (15, 3)):
        config = small_config("bert", norm_order="mix", num_layers=num_layers)
        kinds = [type(placement).__name__ for placement in stage_placements(config, Layout(), 0)]
        assert kinds == ["PostNorm"] * num_post + ["PreNorm"] * (num_layers - num_post)


def test_the_placements_give_different_models() -> None:
    tokens = torch.arange(7)[None]
    outputs = [random_model(config_of(name), ParallelContext()).transformer(tokens).sum().item() for name in REFERENCES]
    assert len({round(value, 6) for value in outputs}) == len(REFERENCES)


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("initializer", ["generator", "counter"])
def test_deepnorm_scales_values_outputs_and_the_mlp_by_beta(family: str, initializer: str) -> None:
    """At 32 layers beta is 256^(-1/4) = 1/4, which is exact; encoder and decoder have the same."""
    settings = {"num_layers": 32, "norm_order": "deepnorm", "initializer": initializer}
    scaled, plain = (
        build_model(small_config(family, scale_residual_init=on, **settings), ParallelContext(), seed=3)
        for on in (True, False)
    )
    assert scaled.transformer.layers[31].placement.residual_scale == pytest.approx(64**0.25, rel=1e-15)
    for ours, other in zip(scaled.transformer.layers, plain.transformer.layers, strict=True):
        parts = zip(*(by_part(layer.attention.qkv.weight).chunk(3) for layer in (ours, other)), strict=True)
        for gain, (part, unscaled) in zip((1.0, 1.0, 0.25), parts, strict=True):
            assert torch.equal(part, gain * unscaled)
        assert torch.equal(ours.attention.output.weight, 0.25 * other.attention.output.weight)
        assert torch.equal(ours.mlp.up.weight, 0.25 * other.mlp.up.weight)
        assert torch.equal(ours.mlp.down.weight, 0.25 * other.mlp.down.weight)
    assert other.mlp.down.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", [*LATER, "pre"])
def test_the_other_placements_scale_only_the_last_matrix_of_a_sublayer(name: str) -> None:
    layer = build_model(config_of(name), ParallelContext(), seed=None, device="meta").transformer.layers[-1]
    others = [layer.mlp.up.weight.shard.std, layer.attention.qkv.weight.shard.std]
    last = {layer.mlp.down.weight.shard.std, layer.attention.output.weight.shard.std}
    if name == "deepnorm":
        assert others == [pytest.approx(0.02 * 40**-0.25, rel=1e-15), 0.02] and last == {others[0]}
    else:
        assert others == [0.02, 0.02] and last == {0.02 / 10**0.5}


LAYOUTS = {
    "plain": ({}, {}),
    "dropout": ({"hidden_dropout": 0.2}, {}),
    "sequence": ({"hidden_dropout": 0.2}, {"sequence_parallel": True}),
    "sequence-full": ({"recompute": "full"}, {"sequence_parallel": True}),
    "full": ({"recompute": "full", "hidden_dropout": 0.2}, {}),
    "selective": ({"recompute": "selective", "attention": "exact"}, {}),
    "halves": ({}, {"batch_halves": True}),
}


QUICK = ("sequence", "full", "halves")


def _differences(rank: int, cases: list[str]) -> dict[str, dict[str, float]]:
    found = {}
    for name, case in itertools.product(LATER, cases):
        model, layout = LAYOUTS[case]
        context = dataclasses.replace(make_context(tp_size=2), **layout)
        batch_size = 4 if layout.get("batch_halves") else 5
        found[f"{name}, {case}"] = differences_from_plain(config_of(name, **model), context, batch_size)
    return found


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param([*LAYOUTS.keys() - set(QUICK)], marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_two_tensor_ranks_equal_one_process(cases: list[str]) -> None:
    for found in run_ranks(_differences, 2, cases):
        for case, differences in found.items():
            assert max(differences.values()) < 1e-12, (case, differences)


@pytest.mark.parametrize("family, name", list(zip(("gpt", "bert") * len(LATER), LATER, strict=False)))
def test_hugging_face_has_none_of_them(family: str, name: str) -> None:
    message = f"`norm_order` of a {family.upper()} must be .* for Hugging Face, but is {name}"
    with pytest.raises(ValueError, match=message):
        model_of(small_config(family, norm_order=name))
