"""Gradient norms per model part: they combine to the global norm and are equal at every layout."""

import math
from types import SimpleNamespace

import pytest
import torch
from runs import read_rows, run_jobs, tiny_run
from sharding import small_config

from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, ShardSpec, global_gradient_norm
from lmscale.parallel.communicator import SingleRankCommunicator
from lmscale.parallel.grad_norm import gradient_norms_of_parts
from lmscale.training.callbacks.layer_gradients import layer_gradient_norms, part_of_model
from lmscale.training.step.optimizer import MixedPrecisionAdamW

PARTS = ("embedding", "layer_0", "layer_1", "output")


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


def test_every_layout_reports_the_same_norms(tmp_path) -> None:
    """2 x 2 with sequence parallelism, also with ZeRO, against one process in fp64; only reported rows have them."""
    settings = {"logger__layer_grad_norms": True, "logger__log_every_steps": 2, "micro_batch_size": 2}
    cut = {"tp_size": 2, "dp_size": 2, "sequence_parallel": True}
    lengths = {"data__seq_length": 32, "model__max_position_embeddings": 32}
    layouts = {"cut": cut, "zero1": cut | {"zero1": True}}
    run_jobs([tiny_run("bert", tmp_path / n, parallel=p, **settings, **lengths) for n, p in layouts.items()], 4)
    run_jobs([tiny_run("bert", tmp_path / "one", **settings, **lengths)], 1)
    rows, *others = (read_rows(tmp_path / name) for name in ("one", *layouts))
    assert [row["step"] for row in rows] == [2, 3]
    for row, *same in zip(rows, *others, strict=True):
        norms = [row[f"grad_norm/{part}"] for part in PARTS]
        assert len([key for key in row if key.startswith("grad_norm/")]) == len(PARTS)
        assert math.hypot(*norms) == pytest.approx(row["grad_norm"], rel=1e-12)
        for other in same:
            assert [other[f"grad_norm/{part}"] for part in PARTS] == pytest.approx(norms, rel=1e-12)


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
