"""Dropout in the models: its places and settings, and masks that are random and depend only on the counter."""

import hashlib
import math

import pytest
import torch
import torch.nn.functional as F
from sharding import random_batch, random_model, small_config
from torch import Tensor

from lmscale.config import TransformerConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, counter_dropout, counter_keep_mask, sample_dropout_keys, site_keys
from lmscale.parallel.rng import counter_bits, keys_from_row, seed_rank_generator

ONE = ParallelContext()
ARCHITECTURES, NORM_ORDERS = ["gpt", "bert"], ["pre", "post"]


def forward_of(config: TransformerConfig, drop_keys: Tensor | None, train: bool = True) -> Tensor:
    model, batch = random_model(config, ONE).train(train), random_batch(config)
    if config.family == "gpt":
        return model(batch["tokens"], None, drop_keys)
    return model(batch["tokens"], batch["token_types"], batch["attention_mask"], None, drop_keys)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "exact"])
def test_evaluation_has_no_dropout_and_needs_no_keys(architecture: str, attention: str) -> None:
    plain = small_config(architecture, attention=attention)
    dropping = small_config(architecture, attention=attention, hidden_dropout=0.5, attention_dropout=0.5)
    keys = sample_dropout_keys(1, torch.arange(5))
    assert torch.equal(forward_of(dropping, None, train=False), forward_of(plain, None))
    assert not torch.equal(forward_of(dropping, keys), forward_of(plain, None))


@pytest.mark.parametrize("changes", [{"hidden_dropout": 0.1}, {"attention_dropout": 0.1}])
def test_several_tensor_ranks_refuse_to_draw_missing_keys(changes: dict) -> None:
    config = small_config("gpt", attention="exact", **changes)
    with pytest.raises(ValueError, match="`sample_keys` must be given"):
        build_model(config, ParallelContext(tp_size=2), seed=1)(random_batch(config)["tokens"])


@pytest.mark.parametrize("norm_order", NORM_ORDERS)
def test_embedding_dropout_follows_the_embedding_norm_of_post_norm(norm_order: str) -> None:
    config = small_config("bert", norm_order=norm_order, hidden_dropout=0.6)
    transformer, batch = random_model(config, ONE).transformer, random_batch(config)
    keys = sample_dropout_keys(1, batch["sample_numbers"])
    dropped = transformer.embed(batch["tokens"], batch["token_types"], site_keys(keys, 1)[0])
    total = (
        transformer.word_embedding.weight[batch["tokens"]]
        + transformer.position_embedding
        + transformer.token_type_embedding[batch["token_types"]]
    )
    if norm_order == "post":
        norm = transformer.embedding_norm
        total = F.layer_norm(total, (24,), norm.weight, norm.bias, 1e-12)
    keep = counter_keep_mask(site_keys(keys, 8)[0], 13, 24, 0.6)
    torch.testing.assert_close(dropped, torch.where(keep, total / 0.4, 0.0), rtol=1e-12, atol=1e-12)
    assert (dropped == 0).float().mean() == pytest.approx(0.6, abs=0.05)  # a later norm would leave no zeros


@pytest.mark.parametrize("norm_order", NORM_ORDERS)
@pytest.mark.parametrize("index", [0, 1])
def test_hidden_dropout_is_applied_to_both_sublayer_outputs_before_the_residual_addition(
    norm_order: str, index: int
) -> None:
    config = small_config("gpt", norm_order=norm_order, hidden_dropout=0.4)
    layer = random_model(config, ONE).transformer.layers[index]
    keys = sample_dropout_keys(1, torch.arange(3))
    x = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def drop(y: Tensor, site: int) -> Tensor:
        return torch.where(counter_keep_mask(site_keys(keys, 8)[site], 7, 24, 0.4), y / 0.6, 0.0)

    first_site = 1 + 3 * index  # site 0: embedding; each layer: attention probabilities, attention output, MLP output
    if norm_order == "pre":
        expected = x + drop(layer.attention(layer.attention_norm(x), None, None), first_site + 1)
        expected = expected + drop(layer.mlp(layer.mlp_norm(expected)), first_site + 2)
    else:
        expected = layer.attention_norm(x + drop(layer.attention(x, None, None), first_site + 1))
        expected = layer.mlp_norm(expected + drop(layer.mlp(expected), first_site + 2))
    torch.testing.assert_close(
        layer(x, None, site_keys(keys, 8)[first_site : first_site + 3]), expected, rtol=1e-12, atol=1e-12
    )


def test_attention_dropout_applies_to_probabilities_after_the_softmax() -> None:
    config = small_config("bert", attention="exact", attention_dropout=0.4)
    layer = random_model(config, ONE).transformer.layers[1]
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64, generator=generator)
    keys = sample_dropout_keys(1, torch.arange(2))
    core_keys = site_keys(keys, 8)[4]
    keep = counter_keep_mask(core_keys, 4 * 7, 7, 0.4).view(2, 4, 7, 7)
    expected = torch.where(keep, torch.softmax(q @ k.mT / math.sqrt(6), dim=-1) / 0.6, 0.0) @ v
    torch.testing.assert_close(layer.attention._exact_core(q, k, v, None, core_keys), expected, rtol=1e-12, atol=1e-12)


def test_no_two_dropouts_of_a_model_share_their_keys() -> None:
    config = small_config("bert", num_layers=5, hidden_dropout=0.1)
    model, found = random_model(config, ONE), []
    for layer in model.transformer.layers:
        layer.register_forward_pre_hook(lambda module, inputs: found.append(inputs[2]))
    batch = random_batch(config)
    keys = sample_dropout_keys(1, batch["sample_numbers"])
    model.transformer(batch["tokens"], batch["token_types"], batch["attention_mask"], keys)
    expected = site_keys(keys, 1 + 3 * 5)
    assert torch.equal(torch.cat(found), expected[1:])  # the first are the embedding's
    assert len({tuple(row.tolist()) for row in expected}) == 1 + 3 * 5


def agreement(first: Tensor, second: Tensor) -> float:
    """Share of equal elements minus that of independent masks, in standard errors."""
    p = first.float().mean().item(), second.float().mean().item()
    chance = p[0] * p[1] + (1 - p[0]) * (1 - p[1])
    share = (first == second).double().mean().item()
    return (share - chance) / math.sqrt(chance * (1 - chance) / first.numel())


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.93])
def test_masks_keep_the_expected_share_and_differ_by_site_sample_seed_row_and_column(probability: float) -> None:
    keys = sample_dropout_keys(1234, torch.arange(37))
    mask = counter_keep_mask(site_keys(keys, 8)[4], 61, 131, probability)
    other_seed = site_keys(sample_dropout_keys(1235, torch.arange(37)), 8)[4]
    error = math.sqrt(probability * (1 - probability) / mask.numel())
    assert abs(mask.double().mean().item() - (1 - probability)) < 4 * error
    pairs = {
        "site": (mask, counter_keep_mask(site_keys(keys, 8)[5], 61, 131, probability)),
        "site of the next layer": (mask, counter_keep_mask(site_keys(keys, 8)[7], 61, 131, probability)),
        "seed": (mask, counter_keep_mask(other_seed, 61, 131, probability)),
        "sample": (mask[1:], mask[:-1]),
        "row": (mask[:, 1:], mask[:, :-1]),
        "column": (mask[..., 1:], mask[..., :-1]),
        "diagonal": (mask[:, 1:, 1:], mask[:, :-1, :-1]),
        "row and sample": (mask[1:, :-1], mask[:-1, 1:]),
    }
    assert {name: value for name, pair in pairs.items() if abs(value := agreement(*pair)) > 4} == {}
    # Each single row and column keeps its share too (6 standard errors, because hundreds are checked).
    for dim, length in ((1, 61), (2, 131)):
        means = mask.double().mean(dim=[d for d in range(3) if d != dim])
        assert (means - (1 - probability)).abs().max() < 6 * error * math.sqrt(length)


def test_masks_do_not_depend_on_batch_order_or_the_rows_of_a_rank() -> None:
    numbers = torch.tensor([5, 2**31 + 5, 17, 2**40])
    keys = sample_dropout_keys(3, numbers)
    assert len(set(keys.tolist())) == 4
    mask = counter_keep_mask(site_keys(keys, 8)[2], 12, 29, 0.3)
    order = torch.tensor([2, 0, 3, 1])
    reordered = site_keys(sample_dropout_keys(3, numbers[order]), 8)[2]
    assert torch.equal(counter_keep_mask(reordered, 12, 29, 0.3), mask[order])
    of_parts = keys_from_row(site_keys(keys, 8)[2].unsqueeze(-1), torch.tensor([0, 4, 8]).int())
    assert torch.equal(torch.cat([counter_keep_mask(part, 4, 29, 0.3) for part in of_parts.unbind(1)], dim=1), mask)


def test_keys_masks_and_seeds_are_those_of_runs_on_record() -> None:
    """Another hash would be as random, but a run that is resumed would go on with other masks."""
    keys = sample_dropout_keys(1234, torch.tensor([0, 5, 2**31 + 5, 2**40]))
    assert keys.tolist() == [-1705425241, 1356187463, -1749513386, 1737910347]
    assert site_keys(keys, 2)[:, :2].tolist() == [[-602328566, 1236152590], [1484830226, -1144199802]]
    assert sample_dropout_keys(2, torch.tensor([0])).tolist() == [1872853978]  # the hash of this seed is negative
    mask = counter_keep_mask(keys_from_row(keys[1:2], torch.tensor([3]).int()), 7, 9, 0.3)
    assert hashlib.blake2b(mask.numpy().tobytes(), digest_size=4).hexdigest() == "d1b4d060"
    bits = counter_bits(keys[1:2], torch.tensor([0, 2]).int(), torch.tensor([1, 7]).int())
    assert bits.tolist() == [[[-2118729349, 1480699560], [-447676499, -138509762]]]
    with torch.random.fork_rng():
        seed_rank_generator(1234, step=3, micro_step=1, dp_rank=2, tp_rank=1)
        assert torch.initial_seed() == 4684031662437398473


def test_a_gpu_has_its_keys_on_the_device_and_its_generator_seeded_once_it_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert site_keys(torch.empty(3, dtype=torch.int32, device="meta"), 4).device.type == "meta"
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    with torch.random.fork_rng():
        for exists in (False, True):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda exists=exists: exists)
            seed_rank_generator(1234, step=3, micro_step=1, dp_rank=2, tp_rank=1)
            assert seeds == [torch.initial_seed()] * exists


def test_dropout_keeps_the_expectation() -> None:
    x = torch.ones(64, 32, 96, dtype=torch.float64)
    dropped = counter_dropout(x, 0.25, site_keys(sample_dropout_keys(9, torch.arange(64)), 4)[3])
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert dropped.mean().item() == pytest.approx(1.0, abs=4 * math.sqrt(0.25 / 0.75 / x.numel()))


def embedded(config) -> torch.Tensor:
    model, batch = random_model(config, ParallelContext()), random_batch(config)
    return model.transformer.embed(
        batch["tokens"], None, site_keys(sample_dropout_keys(1, batch["sample_numbers"]), 1)[0]
    )


def test_it_needs_no_other_dropout() -> None:
    config = small_config("gpt", embedding_dropout=0.4)
    model, batch = random_model(config, ParallelContext()), random_batch(config)
    torch.manual_seed(1)
    losses = {model(batch["tokens"], batch["labels"]).item() for _ in range(2)}
    assert len(losses) == 2


def test_it_follows_hidden_dropout_unless_set() -> None:
    def zeros(**dropout):
        return (embedded(small_config("gpt", **dropout)) == 0).double().mean().item()

    assert zeros() == 0.0
    assert 0.3 < zeros(hidden_dropout=0.4) < 0.5
    assert zeros(hidden_dropout=0.4, embedding_dropout=0.0) == 0.0
    assert 0.3 < zeros(hidden_dropout=0.0, embedding_dropout=0.4) < 0.5


@pytest.mark.parametrize("architecture, norm_order", [("gpt", "pre"), ("bert", "post")])
def test_what_follows_the_lookups_is_one_graph_in_training_and_one_in_evaluation(architecture, norm_order) -> None:
    config = small_config(architecture, norm_order=norm_order, hidden_dropout=0.3)
    model, graphs = random_model(config, ParallelContext()), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    transformer, batch = model.transformer, random_batch(config)
    names = list(transformer.state_dict())
    types = batch["token_types"] if architecture == "bert" else None
    keys = site_keys(sample_dropout_keys(1, batch["sample_numbers"]), 1)[0]
    eager = transformer.embed(batch["tokens"], types, keys)
    transformer._combine = torch.compile(transformer._combine, dynamic=False, fullgraph=True, backend=count)
    for _ in range(2):
        assert torch.equal(transformer.embed(batch["tokens"], types, keys), eager)
    assert len(graphs) == 1 and list(transformer.state_dict()) == names
    model.eval()
    for _ in range(2):
        transformer.embed(batch["tokens"], types, None)
    assert len(graphs) == 2
