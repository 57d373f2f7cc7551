"""Properties of a layer and the stack: norm order, GELU, attention scaling and masking; compiled gradients."""

import math

import pytest
import torch
from sharding import random_batch, random_model, small_config, total_loss
from torch import Tensor, nn

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.models.compiler_options import compiler_options
from lmscale.models.layer import TransformerLayer
from lmscale.parallel import ParallelContext, initialize_parameters

ONE = ParallelContext()
ARCHITECTURES, NORM_ORDERS = ["gpt", "bert"], ["pre", "post"]


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


B, S, H = 3, 40, 64  # more positions than a vector register has numbers


def gradients(dtype: torch.dtype, compiled: bool) -> dict[str, Tensor]:
    config = TransformerConfig("gpt", 1, H, 4, 200, S, attention="exact", hidden_dropout=0.2, attention_dropout=0.1)
    layer = TransformerLayer(config, ParallelContext(), 0).to(dtype)
    initialize_parameters(layer, 1, ParallelContext())
    if compiled:
        torch.compiler.reset()
        layer.compile(dynamic=False)
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, B, S, H, generator=generator, dtype=torch.float64).to(dtype)
    keys = torch.randint(-(2**31), 2**31, (3, B), generator=generator).int()
    x.requires_grad_()
    (layer(x, None, keys) * weight).sum().backward()
    return {"x": x.grad} | {name: param.grad for name, param in layer.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The compiler keeps fp32 between the operations of a half type, so these differ by roundings of those.
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
    ids=["fp64", "fp32", "bf16", "fp16"],
)
def test_compiled_gradients_equal_eager_ones(dtype, tolerance) -> None:
    eager, compiled = gradients(dtype, False), gradients(dtype, True)
    for name, expected in eager.items():
        difference = (compiled[name] - expected).double().abs().max() / expected.double().abs().max()
        assert difference < tolerance, name
