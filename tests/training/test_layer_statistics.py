"""Statistics and gradient norms of each layer: plain formulas, at every layout, without an effect on training."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import make_context, run_ranks
from runs import assert_equal_runs, read_rows, run_jobs, tiny_run
from sharding import random_batch, random_model, small_config, total_loss
from torch import nn

from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, ShardSpec, global_gradient_norm
from lmscale.parallel.communicator import SingleRankCommunicator
from lmscale.parallel.grad_norm import gradient_norms_of_parts
from lmscale.training.callbacks.layer_statistics import FILE, LayerStatistics, measure_sublayers
from lmscale.training.step.layer_gradients import layer_gradient_norms, part_of_model
from lmscale.training.step.optimizer import MixedPrecisionAdamW

EXACT = {"logger__layer_grad_norms": True, "micro_batch_size": 2}
LENGTHS = {"data__seq_length": 32, "model__max_position_embeddings": 32}


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


def near(entry: dict) -> dict:
    return {key: value if isinstance(value, str) else pytest.approx(value, rel=1e-10) for key, value in entry.items()}


def measure(model: nn.Module, batch: dict) -> list[dict]:
    return measure_sublayers(model, lambda: total_loss(model, batch))


@pytest.mark.parametrize(
    ("order", "changes"),
    [
        *((order, {}) for order in ("pre", "post", "deepnorm", "peri")),
        ("pre", {"qk_norm": True}),
        ("pre", {"parametrization": "mup", "base_head_size": 2}),
    ],
)
def test_the_statistics_are_those_of_the_branch_and_the_residual_of_a_layer(order: str, changes: dict) -> None:
    config = small_config("bert", norm_order=order, **changes)
    model, batch = random_model(config, ParallelContext()), random_batch(config)
    found = measure(model, batch)
    assert [(e["layer"], e["sublayer"]) for e in found] == [(i, s) for i in range(2) for s in ("attention", "mlp")]
    with torch.no_grad():
        layer, scale = model.transformer.layers[0], 2**0.5 if order == "deepnorm" else 1.0
        x = model.transformer.embed(batch["tokens"], batch["token_types"], None)
        mask = batch["attention_mask"][:, None, None, :]
        first = layer.attention_norm(x) if order in ("pre", "peri") else x
        branch = layer.attention(first, mask, None)
        branch = layer.attention_output_norm(branch) if order == "peri" else branch
        ratio = branch.var(-1, correction=0).mean() / (scale * x).var(-1, correction=0).mean()
        constant = branch.mean(0).square().mean() / branch.square().mean()
        qkv = layer.attention.qkv(first).view(5, 13, 4, 3, 6)
        q, k = qkv[..., 0, :], qkv[..., 1, :]
        if config.qk_norm:
            q, k = layer.attention.q_norm(q), layer.attention.k_norm(k)
        scale = math.sqrt(2) / 6 if "base_head_size" in changes else 1 / math.sqrt(6)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).mean()
    assert found[0]["variance_ratio"] == pytest.approx(ratio.item(), rel=1e-12)
    assert found[0]["constant_share"] == pytest.approx(constant.item(), rel=1e-12)
    assert found[0]["attention_entropy"] == pytest.approx(entropy.item(), rel=1e-12)
    assert "attention_entropy" not in found[1]


def test_equal_sequences_have_a_constant_branch_and_equal_keys_the_largest_entropy() -> None:
    model = random_model(small_config("gpt"), ParallelContext())
    with torch.no_grad():
        for layer in model.transformer.layers:
            layer.attention.qkv.weight.view(4, 3, 6, 24)[:, 1] = 0.0  # keys
    tokens = torch.arange(11).expand(3, 11)
    found = measure(model, {"tokens": tokens, "labels": tokens, "sample_numbers": torch.arange(3)})
    assert [e["constant_share"] for e in found] == pytest.approx([1.0] * 4, rel=1e-12)
    causal = sum(math.log(n) for n in range(1, 12)) / 11  # a query attends evenly to all positions up to its own
    assert [e["attention_entropy"] for e in found[::2]] == pytest.approx([causal] * 2, rel=1e-12)


def test_measuring_leaves_no_hooks_and_the_mode_as_it_was() -> None:
    config = small_config("gpt", hidden_dropout=0.3)
    model = random_model(config, ParallelContext())
    first, second = (measure(model, random_batch(config)) for _ in range(2))
    assert first == second and model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _measured(rank: int) -> list[list[dict]]:
    found = []
    for family, layout in (("bert", {}), ("gpt", {"sequence_parallel": True}), ("gpt", {"batch_halves": True})):
        config = small_config(family, norm_order="peri", max_position_embeddings=12)
        batch = random_batch(config, 4)
        for context in (ParallelContext(), dataclasses.replace(make_context(tp_size=2), **layout)):
            found.append(measure(random_model(config, context), batch))
    return found


def test_two_tensor_ranks_measure_what_one_process_does() -> None:
    for found in run_ranks(_measured, 2):
        for plain, sharded in zip(found[::2], found[1::2], strict=True):
            assert sharded == [near(one) for one in plain]


def test_a_rank_of_dummy_heads_alone_adds_no_entropy() -> None:
    config = small_config("gpt", hidden_size=20, num_attention_heads=5)
    last = ParallelContext(3, 4, tp_communicator=SingleRankCommunicator(), pad_heads=True)  # of 2, 2, 1 and 0 heads
    assert [e.get("attention_entropy", 0) for e in measure(random_model(config, last), random_batch(config))] == [0] * 4


def test_a_run_writes_its_steps_once_and_trains_as_without(tmp_path: Path) -> None:
    """2 x 2 with sequence parallelism against one process in fp64; stopped after step 2 and resumed."""
    chosen = {"logger__layer_statistics": [1, 3], "checkpoint__save_every_steps": 2, "resume": "auto"}
    cut = {"tp_size": 2, "dp_size": 2, "sequence_parallel": True}
    run_jobs([tiny_run("bert", tmp_path / "without", **EXACT, **LENGTHS)], 1)
    for stop in (2, None):
        more = {"trainer__stop_after_steps": stop}
        run_jobs([tiny_run("bert", tmp_path / "one", **chosen, **EXACT, **LENGTHS, **more)], 1)
    run_jobs([tiny_run("bert", tmp_path / "cut", parallel=cut, **chosen, **EXACT, **LENGTHS)], 4)
    assert not (tmp_path / "without" / FILE).exists()
    rows, plain = read_rows(tmp_path / "one"), read_rows(tmp_path / "without")
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in plain]
    assert_equal_runs(tmp_path / "without", tmp_path / "cut")
    for row in rows:
        norms = [row[f"grad_norm/{part}"] for part in ("embedding", "layer_0", "layer_1", "output")]
        assert math.hypot(*norms) == pytest.approx(row["grad_norm"], rel=1e-12)
    lines, others = read_lines(tmp_path / "one"), read_lines(tmp_path / "cut")
    assert [line["step"] for line in lines] == [line["step"] for line in others] == [1, 3]
    for line, other in zip(lines, others, strict=True):
        for index in range(2):
            norms = [e["gradient_norm"] for e in line["sublayers"] if e["layer"] == index]
            row = next(row for row in rows if row["step"] == line["step"])
            assert math.hypot(*norms) == pytest.approx(row[f"grad_norm/layer_{index}"], rel=1e-12)
        assert other["sublayers"] == [near(one) for one in line["sublayers"]]


def test_a_resumed_run_drops_only_the_lines_of_steps_that_it_repeats(tmp_path: Path, capsys) -> None:
    (tmp_path / FILE).write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4')
    resumed = SimpleNamespace(is_global_zero=True), SimpleNamespace(completed_steps=2)
    LayerStatistics([1, 2, 3], tmp_path).on_train_start(*resumed)
    assert read_lines(tmp_path) == [{"step": 1}, {"step": 2}]
    (tmp_path / FILE).write_text('{"step": 1}\n\0\0\0\n{"step": 2}\n')  # by a crash of the machine
    LayerStatistics([1, 2, 3], tmp_path).on_train_start(*resumed)
    assert f"{FILE} cannot be read; kept as {FILE}.damaged, a new one begins" in capsys.readouterr().err
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("steps", [[0], [1.5], [True], ["1"]])
def test_steps_that_are_none_are_refused(tmp_path: Path, steps: list) -> None:
    with pytest.raises(ValueError, match="`logger.layer_statistics` must be a list of whole numbers of at least 1"):
        tiny_run("gpt", tmp_path, logger__layer_statistics=steps)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_every_parameter_belongs_to_the_part_of_its_position(order) -> None:
    model = build_model(small_config("bert", norm_order=order), ParallelContext(), seed=None, device="meta")
    parts = {name: part_of_model(name) for name, _ in model.named_parameters()}
    assert {part for name, part in parts.items() if "embedding" in name} == {"embedding"}
    assert {part for name, part in parts.items() if ".layers.1." in name} == {"layer_1"}
    after = {name for name, part in parts.items() if part == "output"}
    assert {"lm_head.bias", "pooler.weight"} < after and ("transformer.final_norm.weight" in after) == (order == "pre")


def test_the_norms_exclude_clipping_and_the_loss_scale() -> None:
    model = build_model(small_config("bert"), ParallelContext(), seed=3, dtype=torch.float16)
    precision = PrecisionConfig("fp16", initial_loss_scale=8.0)
    config = OptimizerConfig(lr=0.01, max_grad_norm=1e-3)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), config, precision, ParallelContext())
    optimizer.zero_grad()
    named = dict(model.named_parameters())
    torch.autograd.backward([p * 1 for p in named.values()], [torch.full_like(p, 0.5) for p in named.values()])
    optimizer.reduce_gradients()
    norms = layer_gradient_norms(optimizer)
    numel = dict.fromkeys(norms, 0)
    for name, param in named.items():
        numel[part_of_model(name)] += param.numel()
    assert norms == pytest.approx({p: 0.5 / 8.0 * n**0.5 for p, n in numel.items()}, rel=1e-5)


@pytest.mark.parametrize(
    "dtype, value, numel, num_tensors", [(torch.float16, 300.0, 10**5, 1), (torch.float32, 1.5e19, 1, 10)]
)
def test_the_norm_of_large_gradients_does_not_overflow(
    dtype: torch.dtype, value: float, numel: int, num_tensors: int
) -> None:
    """Norms of tensors are in fp32 at least, the sum of their squares in fp64."""
    param = SimpleNamespace(shard=ShardSpec((numel,), None, "zeros"), grad=torch.full((numel,), value, dtype=dtype))
    found = global_gradient_norm([param] * num_tensors, ParallelContext(), torch.device("cpu"))
    assert found.finite and found.norm.item() == pytest.approx(value * (numel * num_tensors) ** 0.5, rel=1e-3)


def test_a_rank_without_gradients_sends_the_same_type_from_its_device() -> None:
    sent = []

    class Recording(SingleRankCommunicator):
        def all_reduce(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
            sent.append((x.dtype, x.device.type, tuple(x.shape)))
            return torch.zeros_like(x, device="cpu")

    context = ParallelContext(tp_communicator=Recording())
    global_gradient_norm([], context, torch.device("meta"))
    assert gradient_norms_of_parts([[], [], []], context, torch.device("meta")) == [0.0] * 3
    assert sent == [(torch.float64, "meta", (3,)), (torch.float64, "meta", (3, 2))]
