"""Properties of a layer and the stack: norm order, GELU, attention scaling and masking."""

import dataclasses
import math

import pytest
import torch
from sharding import random_batch, random_model, small_config, total_loss
from torch import Tensor, nn

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.models.compiler_options import compiler_options
from lmscale.models.layer import TransformerLayer
from lmscale.parallel import LayerNorm, ParallelContext

ONE = ParallelContext()
ARCHITECTURES, NORM_ORDERS = ["gpt", "bert"], ["pre", "post"]


def batch_inputs(config: TransformerConfig, batch: dict[str, Tensor]) -> list[Tensor]:
    names = ["tokens"] if config.family == "gpt" else ["tokens", "token_types", "attention_mask"]
    return [batch[name] for name in names]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "norm_order, present, absent",
    [
        ("post", "embedding_norm", "final_norm"),
        ("pre", "final_norm", "embedding_norm"),
    ],
)
def test_post_norm_has_a_norm_after_the_embeddings_and_pre_norm_one_after_the_stack(
    architecture: str, norm_order: str, present: str, absent: str
) -> None:
    model = build_model(small_config(architecture, norm_order=norm_order), ONE, seed=1)
    assert isinstance(getattr(model.transformer, present), LayerNorm)
    assert not hasattr(model.transformer, absent)
    num_norms = sum(isinstance(module, LayerNorm) for module in model.modules())
    assert num_norms == 2 * 2 + 1 + (architecture == "bert")  # two per layer, that one, and the masked-LM head's


@pytest.mark.parametrize("norm_order, eps", [("post", 1e-12), ("pre", 1e-5)])
def test_the_epsilon_of_every_norm_is_the_published_one_of_its_order(norm_order: str, eps: float) -> None:
    model = build_model(small_config("bert", norm_order=norm_order), ONE, seed=1)
    assert {module.eps for module in model.modules() if isinstance(module, LayerNorm)} == {eps}


def written_out_layer(layer: TransformerLayer, x: Tensor, norm_order: str) -> Tensor:
    """Figure 7 written with torch's functions and the layer's own sublayers."""

    def norm(module: LayerNorm, y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + module.eps).sqrt() * module.weight + module.bias

    if norm_order == "pre":
        x = x + layer.attention(norm(layer.attention_norm, x), None, None)
        return x + layer.mlp(norm(layer.mlp_norm, x))
    x = norm(layer.attention_norm, x + layer.attention(x, None, None))
    return norm(layer.mlp_norm, x + layer.mlp(x))


@pytest.mark.parametrize("norm_order", NORM_ORDERS)
def test_a_layer_equals_the_papers_figure_7(norm_order: str) -> None:
    layer = random_model(small_config("gpt", norm_order=norm_order), ONE).transformer.layers[1]
    x = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    results = {order: written_out_layer(layer, x, order) for order in NORM_ORDERS}
    torch.testing.assert_close(layer(x, None, None), results[norm_order], rtol=1e-12, atol=1e-12)
    assert (results["pre"] - results["post"]).abs().max() > 0.1


@pytest.mark.parametrize(
    "architecture, gelu, expected",
    [
        ("gpt", None, "tanh"),
        ("bert", None, "none"),
        ("gpt", "erf", "none"),
        ("bert", "tanh", "tanh"),
    ],
)
def test_gelu_is_tanh_in_gpt_and_erf_in_bert_unless_set(architecture: str, gelu: str | None, expected: str) -> None:
    model = random_model(small_config(architecture, gelu=gelu), ONE)
    mlp, x = model.transformer.layers[0].mlp, torch.linspace(-3, 3, 48, dtype=torch.float64).view(2, 24)
    results = gelu_forms(x @ mlp.up.weight.T + mlp.up.bias)
    results = {form: value @ mlp.down.weight.T + mlp.down.bias for form, value in results.items()}
    torch.testing.assert_close(mlp(x), results[expected], rtol=1e-12, atol=1e-12)
    assert (results["tanh"] - results["none"]).abs().max() > 1e-5
    if architecture == "bert":  # its masked-LM head has a GELU of its own
        head = model.lm_head
        wanted = gelu_forms(x @ head.dense.weight.T + head.dense.bias)[expected]
        torch.testing.assert_close(head.transform(x), head.norm(wanted), rtol=1e-12, atol=1e-12)


def gelu_forms(x: Tensor) -> dict[str, Tensor]:
    return {
        "tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "none": 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    }


@pytest.mark.parametrize("attention", ["sdpa", "exact"])
def test_attention_divides_the_scores_by_the_root_of_the_head_size(attention: str) -> None:
    config = small_config("bert", attention=attention)
    module = random_model(config, ONE).transformer.layers[0].attention
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    heads = []
    for head in range(4):  # rows of the fused weight: [head, (q, k, v), d]
        first = head * 3 * 6
        q, k, v = (
            x @ module.qkv.weight[low : low + 6].T + module.qkv.bias[low : low + 6]
            for low in (first, first + 6, first + 12)
        )
        heads.append(torch.softmax(q @ k.mT / math.sqrt(6), dim=-1) @ v)
    expected = torch.cat(heads, dim=-1) @ module.output.weight.T + module.output.bias
    torch.testing.assert_close(module(x, None, None), expected, rtol=1e-12, atol=1e-12)


def test_qk_norm_takes_the_size_out_of_queries_and_keys_and_gives_them_its_gain() -> None:
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for qk_norm in (False, True):
        module = random_model(small_config("gpt", qk_norm=qk_norm, layer_norm_eps=1e-30), ONE).transformer.layers[0]
        before = module.attention(x, None, None)
        with torch.no_grad():
            for rows in (
                module.attention.qkv.weight.view(4, 3, 6, 24)[:, 0],
                module.attention.qkv.bias.view(4, 3, 6)[:, 0],
            ):
                rows.mul_(7.0)
        after = module.attention(x, None, None)
        assert torch.allclose(before, after, rtol=1e-12, atol=1e-12) == qk_norm
    with torch.no_grad():
        module.attention.k_norm.weight.mul_(2.0)
    assert not torch.allclose(after, module.attention(x, None, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_attention_of_half_types_keeps_its_probabilities_in_fp32_for_the_backward_pass(dtype) -> None:
    """Every value has the same large offset, which cancels only in a gradient whose probabilities add up to 1.

    With probabilities in the half type the gradient of the queries is off by 6 %; with fp32, by 0.3 % in bf16.
    """
    core = random_model(small_config("bert", attention="exact"), ONE).transformer.layers[0].attention._exact_core
    offset = 0.5 / torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 2, 4, 7, 6, generator=generator).to(dtype)
    v = (offset + torch.randint(-4, 5, (2, 4, 7, 6), generator=generator) / 2).to(dtype)
    upstream = torch.zeros_like(v)
    upstream[..., 0] = 1.0
    found = []
    for wide in (dtype, torch.float64):
        queries = q.detach().to(wide).requires_grad_()
        core(queries, k.to(wide), v.to(wide), None, None).backward(upstream.to(wide))
        found.append(queries.grad.double())
    assert (found[0] - found[1]).norm() < 2 * torch.finfo(dtype).eps * found[1].norm()


@pytest.mark.parametrize("attention, norm_order", [("sdpa", "pre"), ("exact", "post")])
def test_later_tokens_do_not_influence_earlier_ones_in_gpt(attention: str, norm_order: str) -> None:
    config = small_config("gpt", attention=attention, norm_order=norm_order)
    model = random_model(config, ONE)
    tokens = random_batch(config)["tokens"]
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % config.vocab_size
    before, after = model(tokens)[..., :99], model(changed)[..., :99]
    assert torch.equal(before[:, :8], after[:, :8])
    assert ((before[:, 8:] - after[:, 8:]).abs().amax(dim=(0, 2)) > 1e-6).all()


def test_six_samples_in_halves_equal_the_whole() -> None:
    config = small_config("gpt", attention="exact", hidden_dropout=0.1, attention_dropout=0.1)
    batch = random_batch(config, 6)
    whole, halves = (random_model(config, ParallelContext(batch_halves=halved)) for halved in (False, True))
    torch.testing.assert_close(total_loss(halves, batch), total_loss(whole, batch), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_have_the_gradients_of_kept_ones(recompute: str) -> None:
    config = small_config("gpt", attention="exact", hidden_dropout=0.1, attention_dropout=0.1)
    batch, found = random_batch(config), []
    for mode in ("none", recompute):
        model = random_model(dataclasses.replace(config, recompute=mode), ONE)
        # torch.autograd.grad, because torch's reentrant checkpoints refuse it
        found.append(torch.autograd.grad(total_loss(model, batch), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_every_real_token_influences_every_position_in_bert() -> None:
    config = small_config("bert")
    model, batch = random_model(config, ONE), random_batch(config)
    before = model(*batch_inputs(config, batch))[0][0, :, :99]
    batch["tokens"][0, 12] = (batch["tokens"][0, 12] + 1) % config.vocab_size
    after = model(*batch_inputs(config, batch))[0][0, :, :99]
    assert ((before - after).abs().amax(dim=-1) > 1e-6).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sequence_longer_than_the_positions_is_refused(architecture: str) -> None:
    config = small_config(architecture)
    model = build_model(config, ONE, seed=1)
    tokens = torch.zeros(2, 14, dtype=torch.long)
    inputs = [tokens] if architecture == "gpt" else [tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)]
    with pytest.raises(ValueError, match=r"at most `max_position_embeddings` \(13\) tokens long, but is 14"):
        model(*inputs)
    model(*[values[:, :13] for values in inputs])
    model(*[values[:, :5] for values in inputs])


@pytest.mark.slow
@pytest.mark.parametrize("architecture, norm_order", [("gpt", "pre"), ("bert", "post")])
def test_compiled_layers_give_the_same_loss_and_gradients(architecture: str, norm_order: str) -> None:
    config = small_config(architecture, norm_order=norm_order, hidden_dropout=0.2)
    models = [random_model(config, ONE).float() for _ in range(2)]
    models[1].transformer.compile_layers()
    losses = [total_loss(model, random_batch(config)) for model in models]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert list(models[1].state_dict()) == list(models[0].state_dict())
    gradients = [nn.utils.parameters_to_vector(p.grad for p in model.parameters()) for model in models]
    assert (gradients[1] - gradients[0]).norm() < 1e-5 * gradients[0].norm()


def test_layers_and_embeddings_are_compiled_with_the_options_of_the_layout(monkeypatch) -> None:
    context, calls = ParallelContext(tp_size=2, batch_halves=True), []
    model = build_model(small_config("gpt", num_layers=3), context, seed=None, device="meta")

    def record(*_, **options):
        calls.append(options)

    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr(nn.Module, "compile", record)
    model.transformer.compile_layers()
    assert calls == [{"dynamic": False, "options": compiler_options(context, on_gpu=False)}] * 4
    assert len(calls[0]["options"]) > len(compiler_options(ONE, on_gpu=False))


@pytest.mark.parametrize("attention, recompute", [("sdpa", "none"), ("exact", "full")])
def test_one_graph_serves_all_layers_with_dropout_too(attention: str, recompute: str) -> None:
    """Twelve layers exceed the number of graphs that torch.compile makes of one function."""
    torch.compiler.reset()  # graphs of other tests count too
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "attention": attention, "recompute": recompute}
    model, graphs = random_model(small_config("gpt", num_layers=12, **dropout), ONE), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in model.transformer.layers:
        layer.compile(dynamic=False, backend=count)
    batch = random_batch(model.config)
    for _ in range(2):
        total_loss(model, batch).backward()
    assert len(graphs) == 1
    with torch.no_grad():
        model.eval()(batch["tokens"], batch["labels"])
    assert len(graphs) == 2
