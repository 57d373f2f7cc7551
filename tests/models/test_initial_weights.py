"""Initial weights: their distribution, the same logical tensors at every layout, and the padded vocabulary rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from sharding import local_part, random_batch, small_config, total_loss

from lmscale.models import build_model
from lmscale.parallel import ParallelContext, initialize_parameters, vocab_parallel_logits

ONE = ParallelContext()
ARCHITECTURES = ["gpt", "bert"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scaled", [True, False])
def test_initial_weights_have_the_papers_deviation_scaled_before_residuals(architecture: str, scaled: bool) -> None:
    config = small_config(
        architecture, num_layers=8, hidden_size=96, vocab_size=999, scale_residual_init=scaled, norm_order="post"
    )
    model = build_model(config, ONE, seed=11, dtype=torch.float64)
    for name, param in model.named_parameters():
        values = param.detach()
        if name.endswith(("norm.weight",)):
            assert (values == 1).all(), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        else:
            values = values[: config.vocab_size]
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if scaled and residual else 0.02
            # 4.5 standard errors of the deviation and the mean, for about 60 tensors
            assert values.std().item() == pytest.approx(std, rel=4.5 / math.sqrt(2 * values.numel())), name
            assert abs(values.mean().item()) < 4.5 * std / math.sqrt(values.numel()), name


@pytest.mark.parametrize(
    "tp_size, sizes",
    [
        (2, {}),
        (3, {"hidden_size": 30, "num_attention_heads": 6, "vocab_multiple": 9}),
        (4, {}),
        (8, {"hidden_size": 40, "num_attention_heads": 8}),
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("initializer, dtype", [("generator", torch.float32), ("counter", torch.bfloat16)])
def test_initial_shards_are_bitwise_slices_of_the_whole_at_every_tp_size(
    architecture: str, tp_size: int, sizes: dict, initializer: str, dtype: torch.dtype
) -> None:
    config = small_config(architecture, initializer=initializer, **sizes)
    whole = dict(build_model(config, ONE, seed=5, dtype=dtype).named_parameters())
    for tp_rank in range(tp_size):
        context = ParallelContext(tp_rank=tp_rank, tp_size=tp_size)
        for name, param in build_model(config, context, seed=5, dtype=dtype).named_parameters():
            assert param.shard.replicated or param.numel() * tp_size == whole[name].numel()
            assert torch.equal(param, local_part(whole[name], param, context)), (name, tp_rank)


def test_initial_weights_differ_by_seed_and_by_name() -> None:
    config = small_config("gpt")
    models = [dict(build_model(config, ONE, seed=seed).named_parameters()) for seed in (5, 5, 6)]
    for name, param in models[0].items():
        assert torch.equal(param, models[1][name])
        assert torch.equal(param, models[2][name]) == (param.shard.init != "normal"), name
    first, second = (models[0][f"transformer.layers.{i}.attention.qkv.weight"] for i in (0, 1))
    assert abs(F.cosine_similarity(first.flatten(), second.flatten(), dim=0).item()) < 4 / math.sqrt(first.numel())


def test_the_weights_are_those_of_runs_on_record() -> None:
    weights = dict(build_model(small_config("gpt"), ONE, seed=5).named_parameters())
    up, down = (weights[f"transformer.layers.1.mlp.{name}.weight"] for name in ("up", "down"))
    assert [up[50, 7].item(), down[7, 50].item()] == pytest.approx([2.347115e-4, 3.275840e-3], rel=1e-5)


def test_a_default_device_does_not_change_the_weights() -> None:
    model = build_model(small_config("gpt"), ONE, seed=5)
    before = [param.detach().clone() for param in model.parameters()]
    with torch.device("meta"):
        initialize_parameters(model, 5, ONE)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_rows_start_at_zero_and_have_zero_gradient(architecture: str) -> None:
    config = small_config(architecture)  # 99 ids, 104 rows
    model = build_model(config, ONE, seed=5, dtype=torch.float64)
    weight = model.transformer.word_embedding.weight
    assert (weight[99:] == 0).all() and (weight[:99] != 0).any(dim=1).all()
    total_loss(model, random_batch(config)).backward()
    assert (weight.grad[99:] == 0).all() and (weight.grad[:99] != 0).any(dim=1).all()
    if architecture == "bert":
        assert (model.lm_head.bias.grad[99:] == 0).all() and (model.lm_head.bias.grad[:99] != 0).all()


def test_padding_does_not_shift_the_initial_rows() -> None:
    weights = [
        build_model(small_config("gpt", vocab_multiple=multiple), ONE, seed=5).transformer.word_embedding.weight
        for multiple in (1, 8, 64)
    ]
    assert [len(weight) for weight in weights] == [99, 104, 128]
    assert all(torch.equal(weights[0], weight[:99]) for weight in weights)


@pytest.mark.parametrize("initializer", ["generator", "counter"])
def test_a_rank_with_only_padded_rows_predicts_nothing(initializer: str) -> None:
    config = small_config("gpt", vocab_size=50, vocab_multiple=104, initializer=initializer)
    context = ParallelContext(tp_rank=1, tp_size=2)  # rows 52 to 103
    weight = build_model(config, context, seed=5).transformer.word_embedding.weight
    assert weight.shape == (52, 24) and (weight == 0).all()
    assert (vocab_parallel_logits(torch.ones(2, 3, 24), weight, None, 50, context) == float("-inf")).all()
