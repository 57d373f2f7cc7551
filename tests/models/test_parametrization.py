"""muP and CompleteP: the factors of every parameter, and that a model with them is the standard one at its base."""

import math

import pytest
import torch
import torch.nn.functional as F
from sharding import random_batch, random_model, small_config, total_loss

from lmscale.config.training import OptimizerConfig, PrecisionConfig, ScheduleConfig
from lmscale.models import build_model
from lmscale.models.hugging_face import model_of
from lmscale.parallel import ParallelContext
from lmscale.training.step.learning_rate import UpdateSchedule
from lmscale.training.step.optimizer import MixedPrecisionAdamW

ALONE = ParallelContext()
BASE_WIDTH = {"base_hidden_size": 6, "base_head_size": 3}  # of 24 and 6: N = 4
BASES = {"mup": BASE_WIDTH, "completep": BASE_WIDTH | {"base_num_layers": 1}}  # of 2: D = 2
BASES["completep_unpublished"] = BASES["completep"]
N, D = 4.0, 2.0
BLOCK = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")


def make(family: str, parametrization: str, **changes):
    config = small_config(family, parametrization=parametrization, **changes)
    model = build_model(config, ALONE, seed=3, dtype=torch.float64)
    settings = OptimizerConfig(lr=0.5, eps=1e-4, weight_decay=0.25, max_grad_norm=None)
    return model, MixedPrecisionAdamW(model.named_parameters(), settings, PrecisionConfig("fp64"), ALONE)


def settings_by_name(optimizer) -> dict[str, dict]:
    names = dict(zip(optimizer.masters, optimizer.names, strict=True))
    return {names[master]: group for group in optimizer.param_groups for master in group["params"]}


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("parametrization", ["mup", "completep"])
def test_at_its_base_size_a_model_trains_as_the_standard_one_bit_for_bit(family: str, parametrization: str) -> None:
    weights = {}
    for name in ("standard", parametrization):
        model, optimizer = make(family, name)
        for seed in range(3):
            optimizer.zero_grad()
            total_loss(model, random_batch(model.config, seed=seed)).backward()
            optimizer.step()
        weights[name] = [p.detach() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights["standard"], weights[parametrization], strict=True))


@pytest.mark.parametrize("parametrization, depth", [("mup", 1.0), ("completep", D)])
def test_every_parameter_has_the_factors_of_completeps_table_1(parametrization: str, depth: float) -> None:
    model, optimizer = make("bert", parametrization, **BASES[parametrization])
    found = settings_by_name(optimizer)
    residual_layers = 1 if parametrization == "completep" else 2
    hidden = [f"transformer.layers.{i}.{name}.weight" for i in range(2) for name in BLOCK]
    hidden += ["pooler.weight", "lm_head.dense.weight"]
    for name, param in model.named_parameters():
        group, eps = found[name], 1e-4 / (N * depth) if ".layers." in name else 1e-4 / N
        assert group["eps"] == pytest.approx(eps, rel=1e-12), name
        assert group["rate_factor"] == (1 / N if name in hidden else 1.0), name
        assert group["weight_decay"] == (0.0 if param.ndim == 1 else 0.25 * N if name in hidden else 0.25), name
        if param.ndim > 1:
            std = 0.02 / math.sqrt(N) if name in hidden else 0.02
            is_last = "attention.output" in name or "mlp.down" in name
            assert param.shard.std == pytest.approx(std / math.sqrt(2 * residual_layers) if is_last else std), name
    # What is drawn has that deviation: 13 x 24 and 24 x 24 numbers are within 4 standard errors.
    for name in ("transformer.layers.0.attention.qkv.weight", "transformer.position_embedding"):
        param = model.get_parameter(name)
        assert param.std().item() == pytest.approx(param.shard.std, rel=4 / math.sqrt(2 * param.numel()))


def test_the_schedule_scales_the_floor_too() -> None:
    _, optimizer = make("gpt", "mup", **BASES["mup"])
    UpdateSchedule(optimizer, ScheduleConfig("linear", warmup_steps=0, decay_steps=1, min_lr=0.125), 0.5)
    found = settings_by_name(optimizer)
    assert found["transformer.layers.1.mlp.up.weight"]["lr"] == 0.125 / N
    assert found["transformer.layers.1.mlp.up.bias"]["lr"] == found["transformer.word_embedding.weight"]["lr"] == 0.125


def test_a_step_without_gradients_shrinks_all_matrices_alike() -> None:
    # A coordinate check does not see a wrong decay: microsoft/mup, pull request 73.
    model, optimizer = make("bert", "completep", **BASES["completep"])
    UpdateSchedule(optimizer, ScheduleConfig("constant", warmup_steps=0, decay_steps=1), 0.5)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    for name, param in model.named_parameters():
        factor = 1.0 if param.ndim == 1 else 1.0 - 0.5 * 0.25
        torch.testing.assert_close(param.detach(), factor * before[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("attention", ["sdpa", "exact"])
@pytest.mark.parametrize(
    "family, norm_order, parametrization",
    [
        ("gpt", "pre", "completep"),
        ("bert", "pre", "completep"),
        ("bert", "post", "mup"),
        ("bert", "post", "completep_unpublished"),
    ],
)
def test_a_model_with_its_multipliers_folded_in_is_a_standard_one(
    family: str, norm_order: str, parametrization: str, attention: str
) -> None:
    changes = {"norm_order": norm_order, "attention": attention} | BASES[parametrization]
    config = small_config(family, parametrization=parametrization, **changes)
    model, batch = random_model(config, ALONE), random_batch(config)
    standard = random_model(config.as_standard(), ALONE, seed=1)
    with torch.no_grad():
        for name, param in standard.named_parameters():
            param.copy_(model_of(config).fold(name, model.get_parameter(name).detach(), config))
    inputs = [batch["tokens"], *(batch[name] for name in ("token_types", "attention_mask") if name in batch)]
    found, expected = model.eval()(*inputs), standard.eval()(*inputs)
    for a, b in zip(found, expected, strict=True) if family == "bert" else [(found, expected)]:
        finite = b.isfinite()
        torch.testing.assert_close(a[finite], b[finite], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_the_training_loss_is_that_of_the_scaled_logits(family: str) -> None:
    config = small_config(family, parametrization="completep", **BASES["completep"])
    model, batch = random_model(config, ALONE), random_batch(config)
    inputs = {name: batch[name] for name in ("tokens", "token_types", "attention_mask") if name in batch}
    logits, loss = model(**inputs), model(**inputs, labels=batch["labels"])
    logits, loss = (logits[0], loss[0]) if family == "bert" else (logits, loss)
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


def test_the_multipliers_are_those_of_the_paper() -> None:
    # The other test compares two ways of ours; this one has the numbers.
    rules = small_config("gpt", parametrization="completep", **BASES["completep"]).scaling
    assert (rules.output_factor, rules.residual_factor) == (1 / N, 1 / D)
    assert rules.attention_factor / math.sqrt(6) == pytest.approx(math.sqrt(3) / 6)
    assert small_config("gpt", parametrization="mup", **BASES["mup"]).scaling.residual_factor == 1.0
    anywhere = {"parametrization": "completep_unpublished", "norm_order": "post"} | BASES["completep"]
    assert vars(small_config("gpt", **anywhere).scaling) == vars(rules)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"parametrization": "completep", "norm_order": "post"},
            "`norm_order` must be pre with parametrization=completep",
        ),
        ({"base_hidden_size": 64}, "`base_hidden_size` must be null with parametrization=standard, but is 64"),
        ({"parametrization": "completep", "base_num_layers": 0}, "`base_num_layers` must be"),
        (
            {"parametrization": "mup", "base_num_layers": 2},
            "`base_num_layers` must be null with parametrization=mup, but is 2",
        ),
        (
            {"parametrization": "muP"},
            "`parametrization` must be one of standard, mup, completep, completep_unpublished, but",
        ),
    ],
)
def test_a_choice_that_has_no_rule_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config("gpt", **changes)
