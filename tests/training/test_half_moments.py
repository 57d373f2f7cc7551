"""bf16 moments: unbiased rounding, training close to fp32, bitwise resume, half the bytes."""

import pytest
import torch
from runs import read_rows, read_tensors, run_jobs, tiny_run
from sharding import small_config

from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.planner.memory import estimate_memory
from lmscale.training.pretrain import prepare_job, pretrain
from lmscale.training.step.half_moments import round_to_bf16
from lmscale.training.step.optimizer import MixedPrecisionAdamW


def test_rounding_gives_an_adjacent_value_and_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([1.0, 1.001, -1.003, 3e-12, -7.7e20, 0.0, 1.0039])
    draws = torch.stack([round_to_bf16(values, generator) for _ in range(4000)]).double()
    below = values.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32).double()
    above = (below.float().view(torch.int32) + (1 << 16)).view(torch.float32).double()
    for column in range(len(values)):
        assert set(draws[:, column].tolist()) <= {below[column].item(), above[column].item()}
    steps = (above - below).abs()
    assert ((draws.mean(dim=0) - values.double()).abs() / steps).max() < 4 * 0.5 / 4000**0.5
    assert torch.equal(draws[:, 0], torch.ones(4000, dtype=torch.float64))  # exact in bf16: unchanged


def test_stochastic_rounding_tracks_a_second_moment_where_nearest_rounding_stalls() -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    param.shard = None
    optimizer = MixedPrecisionAdamW.__new__(MixedPrecisionAdamW)
    torch.optim.Optimizer.__init__(optimizer, [param], {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8})
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.masters, optimizer.names = [param], ["w"]
    for optimizer.num_updates in range(1500):
        param.grad = torch.ones(4096)
        optimizer._step_with_half_moments()
    moment = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    assert moment == pytest.approx(1 - 0.999**1500, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_stays_close_to_fp32_and_resumes_bitwise(tmp_path, dtype) -> None:
    settings = {"trainer__max_steps": 8, "precision__dtype": dtype, "resume": "auto"}
    half = settings | {"optimizer__moments": "bf16"}
    assert pretrain(prepare_job(tiny_run("gpt", tmp_path / "fp32", **settings))) == 0
    assert pretrain(prepare_job(tiny_run("gpt", tmp_path / "whole", **half))) == 0
    for stop in (3, None):
        assert pretrain(prepare_job(tiny_run("gpt", tmp_path / "parts", trainer__stop_after_steps=stop, **half))) == 0
    rows, parts, plain = (read_rows(tmp_path / name) for name in ("whole", "parts", "fp32"))
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in parts]
    assert [row["train/loss"] for row in rows] == pytest.approx([row["train/loss"] for row in plain], rel=2e-3)
    assert rows[-1]["train/loss"] != plain[-1]["train/loss"]
    tensors, others = read_tensors(tmp_path / "whole"), read_tensors(tmp_path / "parts")
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    kinds = {key.partition("/")[0]: tensor.dtype for key, tensor in tensors.items()}
    assert kinds == {"model": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_replicas_round_identically_and_zero1_changes_nothing(tmp_path) -> None:
    settings = {
        "parallel__dp_size": 2,
        "precision__dtype": "bf16",
        "optimizer__moments": "bf16",
        "trainer__check_replicas_every_steps": 1,
    }
    run_jobs([tiny_run("bert", tmp_path / str(z), parallel__zero1=z, **settings) for z in (False, True)], 2)
    tensors, others = (read_tensors(tmp_path / name) for name in ("False", "True"))
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)


@pytest.mark.parametrize(("name", "state"), [("fp32", 4), ("bf16", 8)])
def test_the_state_has_the_estimated_size(name, state) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    model = build_model(small_config("gpt"), ParallelContext(), seed=1, dtype=dtype)
    config = OptimizerConfig(lr=1e-3, moments="bf16")
    optimizer = MixedPrecisionAdamW(model.named_parameters(), config, PrecisionConfig(name), ParallelContext())
    torch.stack([param.float().sum() for param in model.parameters()]).sum().backward()
    optimizer.step()
    moments = [tensor for key, tensor in optimizer.tensors().items() if key.startswith("exp_avg")]
    count = sum(param.numel() for param in model.parameters())
    assert sum(tensor.numel() * tensor.element_size() for tensor in moments) == 4 * count
    assert estimate_memory(small_config("gpt"), 1, 1, 8, name, half_moments=True).optimizer_state == state * count


def test_other_moment_types_are_refused() -> None:
    with pytest.raises(ValueError, match="`moments` must be one of fp32, bf16, but is 'fp8'"):
        OptimizerConfig(lr=1e-3, moments="fp8")
