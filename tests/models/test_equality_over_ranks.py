"""Models on 2 and 4 tensor ranks equal one process, with every norm order, recomputation mode and dropout."""

import dataclasses
import itertools

import pytest
import torch
from ranks import make_context, run_ranks
from sharding import (
    COMPLETEP,
    differences_from_plain,
    gradients_of_ranks,
    random_batch,
    random_model,
    small_config,
    total_loss,
)

from lmscale.config import TransformerConfig
from lmscale.parallel import ParallelContext, seed_rank_generator, sync_replicated_gradients

BOUND = 1e-12
ARCHITECTURES, NORM_ORDERS, RECOMPUTES = ("gpt", "bert"), ("pre", "post"), ("none", "selective", "full")
# Hidden dropout masks are independent of the layout; attention dropout masks are with exact attention.
RANDOMNESS = [
    {"attention": "sdpa"},
    {"attention": "sdpa", "hidden_dropout": 0.2},
    {"attention": "exact", "hidden_dropout": 0.2, "attention_dropout": 0.2},
]
ALL = list(itertools.product(ARCHITECTURES, NORM_ORDERS, RECOMPUTES, range(len(RANDOMNESS))))
# Every two choices meet in one of these nine.
PAIRS = [
    (ARCHITECTURES[i % 2], NORM_ORDERS[i // 2 % 2], recompute, randomness)
    for i, (recompute, randomness) in enumerate(itertools.product(RECOMPUTES, range(len(RANDOMNESS))))
]


def make_configs(choices: list[tuple]) -> list[TransformerConfig]:
    return (
        [
            small_config(
                architecture, norm_order=norm_order, recompute=recompute, max_position_embeddings=12, **changes
            )
            for architecture, norm_order, recompute, randomness in choices
            for changes in [RANDOMNESS[randomness]]
        ]
        + [
            # 50 ids in 104 rows: the last rank, or the last two of four, hold only padding
            small_config(architecture, vocab_size=50, vocab_multiple=104, max_position_embeddings=12)
            for architecture in ARCHITECTURES
        ]
        + [
            small_config(architecture, max_position_embeddings=12, **changes)
            for architecture in ARCHITECTURES
            for changes in (COMPLETEP, {"qk_norm": True})
        ]
    )


def _replicated_gradients(
    config: TransformerConfig, context: ParallelContext, batch_size: int
) -> dict[str, torch.Tensor]:
    model = random_model(config, context).float()  # fp32 rounding makes a difference visible sooner
    total_loss(model, random_batch(config, batch_size)).backward()
    own = gradients_of_ranks(model)
    sync_replicated_gradients(model.parameters(), context)
    return {name: own.get(name, p.grad) for name, p in model.named_parameters() if p.shard.replicated}


def _run_all(
    rank: int, configs: list[TransformerConfig], tp_size: int, sequence_parallel: bool, batch_halves: bool
) -> tuple[list, list]:
    context = make_context(tp_size)
    context = dataclasses.replace(context, sequence_parallel=sequence_parallel, batch_halves=batch_halves)
    batch_size = 4 if batch_halves else 5
    differences = [differences_from_plain(config, context, batch_size) for config in configs]
    dropping = [config for config in configs if config.attention_dropout > 0]
    return differences, [_replicated_gradients(config, context, batch_size) for config in dropping]


LAYOUTS = {  # tp_size, sequence_parallel, batch_halves
    "tp2": (2, False, False),
    "tp4": (4, False, False),
    "tp2 sequence": (2, True, False),
    "tp4 sequence": (4, True, False),
    "tp2 halves": (2, False, True),
    "tp4 halves": (4, False, True),
    "tp2 sequence halves": (2, True, True),
    "tp4 sequence halves": (4, True, True),
}
CASES = [(layout, PAIRS) for layout in ("tp4", "tp2 sequence", "tp2 halves", "tp2 sequence halves")]
SLOW = [(layout, ALL) for layout in LAYOUTS]


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES + SLOW],
    ids=lambda case: f"{case[0]}, {len(case[1])} models",
)
def results_by_rank(request) -> tuple[list[TransformerConfig], list[tuple[list, list]]]:
    """All models in one start of the processes; the models, and what each rank found."""
    layout, choices = request.param
    configs = make_configs(choices)
    return configs, run_ranks(_run_all, LAYOUTS[layout][0], configs, *LAYOUTS[layout])


def test_loss_gradients_and_norm_equal_those_of_one_process(results_by_rank) -> None:
    configs, found_by_rank = results_by_rank
    for differences, _ in found_by_rank:
        pairs = zip(configs, differences, strict=True)
        wrong = [(config, found) for config, found in pairs if not all(value < BOUND for value in found.values())]
        assert wrong == []


def test_replicated_parameters_have_bitwise_equal_gradients_on_all_ranks(results_by_rank) -> None:
    configs, ((_, first), *others) = results_by_rank
    assert len(first) == sum(config.attention_dropout > 0 for config in configs) >= 3
    for _, other in others:
        for expected, found in zip(first, other, strict=True):
            assert {"transformer.layers.1.mlp.down.bias", "transformer.layers.0.mlp_norm.weight"} <= set(expected)
            assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("architecture, norm_order", list(itertools.product(ARCHITECTURES, NORM_ORDERS)))
@pytest.mark.parametrize("attention", ["sdpa", "exact"])
def test_recomputation_is_bitwise_equal_also_with_dropout(architecture: str, norm_order: str, attention: str) -> None:
    results = {}
    for recompute in RECOMPUTES:
        config = small_config(
            architecture,
            norm_order=norm_order,
            recompute=recompute,
            attention=attention,
            hidden_dropout=0.2,
            attention_dropout=0.2,
        )
        model = random_model(config, ParallelContext())
        seed_rank_generator(1234, step=3, micro_step=0, dp_rank=0, tp_rank=0)
        loss = total_loss(model, random_batch(config))
        # torch.autograd.grad, because torch's reentrant checkpoints refuse it
        results[recompute] = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for recompute in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(results["none"], results[recompute], strict=True)), recompute
