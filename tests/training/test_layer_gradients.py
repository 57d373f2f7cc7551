"""Gradient norms per model part. test_layouts.py and test_layer_statistics.py compare those of runs."""

from types import SimpleNamespace

import pytest
import torch
from sharding import small_config

from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext, ShardSpec, global_gradient_norm
from lmscale.parallel.communicator import SingleRankCommunicator
from lmscale.parallel.grad_norm import gradient_norms_of_parts
from lmscale.training.callbacks.layer_gradients import layer_gradient_norms, part_of_model
from lmscale.training.step.optimizer import MixedPrecisionAdamW


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
