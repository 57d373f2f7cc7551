"""Heads that tp_size does not divide: the same model with dummy heads, which stay exactly zero."""

import dataclasses
import re
from contextlib import nullcontext

import pytest
import torch
from ranks import make_context, run_ranks
from sharding import (
    compiler,
    count_model_parameters,
    differences_from_plain,
    dummy_part,
    local_part,
    random_batch,
    random_model,
    small_config,
    total_loss,
)

from lmscale.config import TransformerConfig
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.kernels import PLAIN
from lmscale.models import build_model
from lmscale.models.key_value_cache import KeyValueCache
from lmscale.parallel import ParallelContext
from lmscale.training.callbacks.layer_statistics import measure_sublayers
from lmscale.training.step.optimizer import MixedPrecisionAdamW
from lmscale.training.step.training_module import DTYPES

BOUND = 1e-12
DROPPING = {"attention": "exact", "hidden_dropout": 0.2, "attention_dropout": 0.2}
# tp_size and heads, of which the ranks have 2 1; 2 2 0; 2 2 1; 2 2 1 0.
SPLITS = [(2, 3), (3, 4), (3, 5), (4, 5)]


def padded_config(family: str, heads: int, tp_size: int, **changes) -> TransformerConfig:
    """The small model with other heads, and with MLP, rows and positions that `tp_size` divides; 99 ids in 120 rows."""
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "ffn_hidden_size": 24 * tp_size}
    return small_config(family, **sizes, vocab_multiple=60, max_position_embeddings=12, **changes)


def padded_context(tp_rank: int, tp_size: int) -> ParallelContext:
    return ParallelContext(tp_rank, tp_size, pad_heads=True)


def _compare(rank: int, tp_size: int, configs: list[TransformerConfig]) -> list[dict[str, float]]:
    found = []
    for sequence_parallel in (False, True):
        context = dataclasses.replace(make_context(tp_size), pad_heads=True, sequence_parallel=sequence_parallel)
        found += [differences_from_plain(config, context) for config in configs]
    return found


@pytest.mark.parametrize(
    ("tp_size", "heads"),
    [*SPLITS[:2], *(pytest.param(*split, marks=pytest.mark.slow) for split in (*SPLITS[2:], (4, 7)))],
)
def test_loss_gradients_and_norm_equal_those_of_one_process(tp_size: int, heads: int) -> None:
    """The gradients of dummy heads too: they are compared with zeros."""
    configs = [
        padded_config("gpt", heads, tp_size, recompute="none", **DROPPING),
        padded_config("gpt", heads, tp_size, norm_order="post", recompute="full"),
        padded_config("bert", heads, tp_size, recompute="selective", **DROPPING),
        padded_config("bert", heads, tp_size, norm_order="post"),
    ]
    for differences in run_ranks(_compare, tp_size, tp_size, configs):
        assert len(differences) == 2 * len(configs)
        assert [found for found in differences if not all(value < BOUND for value in found.values())] == []


@pytest.mark.parametrize("initializer", ["generator", "counter"])
@pytest.mark.parametrize(("tp_size", "heads"), SPLITS)
def test_initial_shards_are_slices_of_the_whole_and_zeros(tp_size: int, heads: int, initializer: str) -> None:
    config = padded_config("bert", heads, tp_size, initializer=initializer, norm_order="deepnorm")
    whole = dict(build_model(config, ParallelContext(), seed=5).named_parameters())
    dummies = 0
    for rank in range(tp_size):
        context = padded_context(rank, tp_size)
        for name, param in build_model(config, context, seed=5).named_parameters():
            assert torch.equal(param, local_part(whole[name], param, context)), (name, rank)
            dummies += dummy_part(param, param.shard, context).numel()
    expected = 2 * (4 * 8 * heads + 3) * (config.padded_width(tp_size) - 8 * heads)
    assert dummies == expected > 0


# type, of the moments, ZeRO stage 1, sequence parallelism, backend of torch.compile
VARIANTS = [
    pytest.param(("fp32", "fp32", False, True, "aot_eager"), marks=pytest.mark.slow),
    ("fp16", "fp32", True, False, None),
    ("bf16", "bf16", True, True, None),
    ("fp8", "fp32", False, True, None),  # whose scales are of a rank's largest weight: on the last rank there is none
    pytest.param(("bf16", "bf16", False, False, "aot_eager"), marks=pytest.mark.slow),
]


def _train(rank: int, tp_size: int, configs: list[TransformerConfig], variant: tuple) -> tuple[int, list[str]]:
    """Number of dummy elements on this rank, and what is not zero of them, or is not trained, after three updates."""
    dtype, moments, zero1, sequence_parallel, backend = variant
    context = make_context(tp_size, 2 if zero1 else 1)
    context = dataclasses.replace(context, pad_heads=True, sequence_parallel=sequence_parallel, zero1=zero1)
    number, wrong = 0, []
    for config in configs:
        kernels = dataclasses.replace(PLAIN, float8=dtype == "fp8")
        model = build_model(config, context, seed=3, dtype=DTYPES[dtype], kernels=kernels)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        options = OptimizerConfig(lr=0.01, weight_decay=0.1, moments=moments)
        precision = PrecisionConfig(dtype, initial_loss_scale=64.0)
        optimizer = MixedPrecisionAdamW(model.named_parameters(), options, precision, context)
        with compiler(backend) if backend else nullcontext():
            if backend:
                model.transformer.compile_layers()
            for step in range(3):
                for last in (False, True):
                    if last:
                        optimizer.start_grad_sync()
                    batch = random_batch(config, seed=10 * step + 5 * last + context.dp_rank)
                    loss = total_loss(model, batch) / batch["labels"].numel()
                    (loss * optimizer.counters.loss_scale).backward()
                optimizer.reduce_gradients()
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.counters.read().num_updates == 3
        shards = {name: param.shard for name, param in model.named_parameters()}
        tensors = {f"weights/{name}": param.detach() for name, param in model.named_parameters()}
        keys = {f"{kind}/{name}" for kind in optimizer.kinds for name in shards}
        for key, tensor in (tensors | optimizer.whole_tensors(keys)).items():
            kind, name = key.split("/", 1)
            dummies = dummy_part(tensor, shards[name], context)
            number += dummies.numel()
            if dummies.any() or not tensor.isfinite().all():
                wrong.append(key)
            if kind == "weights" and dummies.numel() < tensor.numel() and torch.equal(tensor, before[name]):
                wrong.append(f"{key} is not trained")
    return number, wrong


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: " ".join(str(each) for each in v))
def test_dummy_heads_stay_exactly_zero_in_training(variant: tuple) -> None:
    """Weights, masters and both moments, with dropout, weight decay, a loss scale and every recomputation mode."""
    tp_size, heads = (2, 3) if variant[2] else (3, 4)
    recomputes = {"gpt": "none", "bert": "selective"} if variant[4] else {"gpt": "full", "bert": "selective"}
    configs = [padded_config(family, heads, tp_size, recompute=mode, **DROPPING) for family, mode in recomputes.items()]
    results = run_ranks(_train, 2 * tp_size if variant[2] else tp_size, tp_size, configs, variant)
    assert [wrong for _, wrong in results] == [[]] * len(results)
    *first, (last, _) = [results[i] for i in range(tp_size)]
    assert last > 0 and [number for number, _ in first] == [0] * len(first)


def _observe(rank: int, tp_size: int, config: TransformerConfig) -> tuple[list[dict], torch.Tensor]:
    """Statistics of the sublayers, and logits of two tokens by the cache of generation."""
    context = dataclasses.replace(make_context(tp_size), pad_heads=True)
    model = random_model(config, context)
    statistics = measure_sublayers(model, lambda: total_loss(model, random_batch(config)))
    cache = KeyValueCache(config, context, 5, 12, torch.float64)
    tokens = random_batch(config)["tokens"]
    with torch.inference_mode():
        for column in (0, 1):
            logits = model.eval().next_token_logits(tokens[:, column : column + 1], torch.ones(5).long(), cache)
    return statistics, logits


def test_statistics_and_cached_logits_are_those_of_one_process() -> None:
    config = padded_config("gpt", 4, 3)
    ((statistics, logits),) = run_ranks(_observe, 1, 1, config)
    found = run_ranks(_observe, 3, 3, config)
    for others, _ in found:
        for entry, other in zip(statistics, others, strict=True):
            assert other == {k: v if isinstance(v, str) else pytest.approx(v, rel=BOUND) for k, v in entry.items()}
    together = torch.cat([part for _, part in found], -1)
    assert (together[:, :99] - logits[:, :99]).abs().max() < BOUND * logits[:, :99].abs().max()


@pytest.mark.parametrize(
    ("heads", "tp_size", "message"),
    [
        (20, 8, "is 20, which a run with `parallel.pad_heads=true` pads to 24; valid sizes: 1, 2, 4, 5, 10, 20"),
        (4, 3, "is 4, which a run with `parallel.pad_heads=true` pads to 6; valid sizes: 1, 2, 4"),
    ],
)
def test_the_refusal_names_the_sizes_that_divide_and_the_key(heads: int, tp_size: int, message: str) -> None:
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "ffn_hidden_size": 960, "vocab_multiple": 960}
    config = small_config("gpt", **sizes)
    with pytest.raises(ValueError, match=rf"`num_attention_heads` must be .* but {re.escape(message)}$"):
        count_model_parameters(config, tp_size)


@pytest.mark.parametrize("changes", [{"ffn_hidden_size": 100}, {"vocab_multiple": 8}])
def test_the_refusal_does_not_name_the_key_where_padding_does_not_help(changes: dict) -> None:
    config = small_config("gpt", **{"ffn_hidden_size": 96, "vocab_multiple": 96} | changes)
    with pytest.raises(ValueError, match=r"`num_attention_heads` must be .* but is 4; valid sizes: 1, 2, 4$"):
        config.check_tensor_parallel(3)


def test_padding_does_not_help_where_the_mlp_or_the_vocabulary_is_not_divided() -> None:
    with pytest.raises(
        ValueError, match=r"`ffn_hidden_size` must be .* of `tp_size` \(5\), but is 96; valid sizes: 1, 2"
    ):
        small_config("gpt").check_tensor_parallel(5, pad_heads=True)
    with pytest.raises(ValueError, match=r"`vocab_multiple` must pad .* `tp_size` \(3\) rows, but 8 pads it to 104"):
        small_config("gpt").check_tensor_parallel(3, pad_heads=True)


def test_float8_takes_heads_that_are_wide_enough_on_every_rank() -> None:
    sizes = {"vocab_multiple": 8, "ffn_hidden_size": 96}
    small_config("gpt", hidden_size=96, num_attention_heads=4, **sizes).check_float8(3)  # 2 heads of 24
    with pytest.raises(ValueError, match=r"multiple of 16 x tp_size \(2\) .* but is 120 \(144 with dummy heads\)"):
        small_config("gpt", hidden_size=120, num_attention_heads=5, **sizes).check_float8(2)  # 3 of 24
