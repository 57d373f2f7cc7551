"""ZeRO stage 1: the same run with the optimizer state sharded over the data ranks, and its checkpoints."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import make_context, run_ranks
from runs import read_rows, read_tensors, run_jobs, tiny_run
from sharding import small_config
from torch import nn

from lmscale.checkpoint import list_checkpoints, read_metadata
from lmscale.config import Layout
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.parallel.shard_spec import ShardSpec
from lmscale.partition import assign_owners
from lmscale.planner.communication import step_collectives
from lmscale.planner.memory import estimate_memory
from lmscale.planner.workload import Workload
from lmscale.training.pretrain import pretrain
from lmscale.training.resolve import resolve
from lmscale.training.step.gradient_buffer import GradientBuffer
from lmscale.training.step.optimizer import MixedPrecisionAdamW
from lmscale.training.step.training_module import DTYPES


@pytest.mark.parametrize("num_owners", [1, 2, 3, 7, 100])
def test_parameters_are_balanced_over_owners_up_to_the_largest_parameter(num_owners) -> None:
    sizes = [900] + [100] * 20 + [10] * 33

    def parts_of(sizes: list[int]) -> list[int]:
        owners = assign_owners(sizes, num_owners)
        return sorted(sum(s for s, o in zip(sizes, owners, strict=True) if o == n) for n in range(num_owners))

    parts = parts_of(sizes)
    assert sum(parts) == sum(sizes) and parts == parts_of(sizes[::-1])
    assert max(parts) <= max(900, sum(sizes) / num_owners + 100)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [pytest.param("gpt", "fp32", marks=pytest.mark.slow), ("bert", "bf16"), ("gpt", "fp16")],
)
def test_zero1_does_not_change_the_run(tmp_path, architecture, dtype) -> None:
    """Sums over two ranks have one order: without clipping, whose norm has other partial sums, all bits are equal."""
    settings = {
        "parallel__dp_size": 2,
        "precision__dtype": dtype,
        "precision__initial_loss_scale": 2.0**14,
        "micro_batch_size": 2,
        "trainer__check_replicas_every_steps": 1,
        "model__hidden_dropout": 0.1,
        "optimizer__max_grad_norm": None,
    }
    runs = [tiny_run(architecture, tmp_path / str(z), parallel__zero1=z, **settings) for z in (False, True)]
    run_jobs(runs, 2)
    plain, cut = (tmp_path / name for name in ("False", "True"))
    exact = dtype != "fp32"  # in fp32 DDP divides by the number of data ranks, which the loss was multiplied with
    for row, other in zip(read_rows(plain), read_rows(cut), strict=True):
        assert other["train/loss"] == (row["train/loss"] if exact else pytest.approx(row["train/loss"], rel=1e-6))
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-12 if exact else 1e-6)
    tensors, others = read_tensors(plain), read_tensors(cut)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(others[key], tensor, rtol=0, atol=0 if exact else 1e-6, msg=key)


@pytest.mark.parametrize("dtype", ["fp64", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_resumes_with_and_without_zero1_at_other_layouts(tmp_path, dtype) -> None:
    """dp 2 with ZeRO, then tp 2 x dp 2 with ZeRO, then one process equal an uninterrupted run."""
    settings = {"trainer__max_steps": 6, "precision__dtype": dtype, "resume": "auto"}
    assert pretrain(resolve(tiny_run("bert", tmp_path / "whole", **settings))) == 0
    part = tmp_path / "part"
    layouts = [{"parallel__dp_size": 2}, {"parallel__dp_size": 2, "parallel__tp_size": 2}]
    for stop, layout in zip((2, 4), layouts, strict=True):
        run = tiny_run("bert", part, parallel__zero1=True, trainer__stop_after_steps=stop, **layout, **settings)
        run_jobs([run], 2 * stop // 2)
    pieces = read_metadata(list_checkpoints(part / "checkpoints")[-1]).tensors
    assert {len(entry.pieces) for entry in pieces.values()} == {1, 2}  # pieces of tensor ranks only
    assert len(read_metadata(list_checkpoints(part / "checkpoints")[-1]).files) == 4  # every rank wrote a file
    assert pretrain(resolve(tiny_run("bert", part, **settings))) == 0
    bound = 1e-12 if dtype == "fp64" else 2e-2
    for row, other in zip(read_rows(tmp_path / "whole"), read_rows(part), strict=True):
        assert other["train/loss"] == pytest.approx(row["train/loss"], rel=bound)


def test_zero1_works_with_sequence_parallelism_and_bf16_moments(tmp_path) -> None:
    """With sequence parallelism only the owner sums the partial gradients."""
    settings = {"data__seq_length": 32, "micro_batch_size": 2}
    assert pretrain(resolve(tiny_run("bert", tmp_path / "one", **settings))) == 0
    both = {"parallel__tp_size": 2, "parallel__dp_size": 2, "parallel__sequence_parallel": True}
    half = {"precision__dtype": "bf16", "optimizer__moments": "bf16", "trainer__check_replicas_every_steps": 1}
    run_jobs(
        [
            tiny_run("bert", tmp_path / "cut", parallel__zero1=True, **both, **settings),
            tiny_run("bert", tmp_path / "half", parallel__zero1=True, **half, **both, **settings),
        ],
        4,
    )
    one, cut, half_rows = (read_rows(tmp_path / name) for name in ("one", "cut", "half"))
    for column in ("train/loss", "grad_norm"):
        assert [row[column] for row in cut] == pytest.approx([row[column] for row in one], rel=1e-12)
        assert [row[column] for row in half_rows] == pytest.approx([row[column] for row in one], rel=0.05)


def _updated(rank: int, name: str) -> tuple[list[str], torch.Tensor]:
    """One parameter on two data ranks after one update: what this rank owns, and its new weight."""
    context = dataclasses.replace(make_context(1, 2), zero1=True)
    param = torch.nn.Parameter(torch.ones(4, 4, dtype=DTYPES[name]))
    param.shard = ShardSpec((4, 4), None, "ones")
    optimizer = MixedPrecisionAdamW([("w", param)], OptimizerConfig(lr=0.1), PrecisionConfig(name, 1.0), context)
    (param * (rank + 1)).sum().backward()
    optimizer.reduce_gradients()
    optimizer.step()
    return optimizer.names, param.detach().float()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_rank_that_owns_no_parameter_receives_the_update(name) -> None:
    (owned, weight), (none, other) = run_ranks(_updated, 2, name)
    assert (owned, none) == (["w"], [])
    assert torch.equal(weight, other) and torch.allclose(weight, torch.tensor(0.9), atol=0.01)


def _sent(rank: int) -> Counter:
    """Collectives of one update over the data group: a count per (operation, elements)."""
    found: Counter = Counter()
    originals = dist.reduce, dist.broadcast

    def noted(name, original):
        def call(tensor, *args, **kwargs):
            found[name, tensor.numel() * tensor.element_size()] += 1
            return original(tensor, *args, **kwargs)

        return call

    dist.reduce, dist.broadcast = noted("reduce", dist.reduce), noted("broadcast", dist.broadcast)
    try:
        _held_bytes(rank, torch.bfloat16, "bf16", dp_size=3)
    finally:
        dist.reduce, dist.broadcast = originals
    return found


def test_an_update_issues_the_collectives_of_the_formula() -> None:
    (found, *_) = run_ranks(_sent, 3)
    job = Workload(small_config("gpt"), 1, 3, 13, "bf16")
    formula = step_collectives(job, Layout(dp_size=3, zero1=True))
    expected = {(c.kind, c.num_bytes): c.count for c in formula if c.kind in ("reduce", "broadcast")}
    assert dict(found) == expected != {}
    plain = step_collectives(job, Layout(dp_size=3))
    assert sum(c.total_bytes for c in formula if c.kind == "reduce") == sum(
        c.total_bytes for c in plain if c.phase == "gradients"
    )


def _held_bytes(rank: int, dtype: torch.dtype, name: str, dp_size: int = 2) -> int:
    context = dataclasses.replace(make_context(1, dp_size), zero1=True)
    model = build_model(small_config("gpt"), context, seed=1, dtype=dtype)
    precision = PrecisionConfig(name, initial_loss_scale=1.0)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), OptimizerConfig(lr=1e-3), precision, context)
    torch.stack([param.double().sum() for param in model.parameters()]).sum().backward()
    optimizer.reduce_gradients()
    optimizer.step()
    held = [*model.parameters(), *optimizer.tensors().values(), optimizer.buffer.flat]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_rank_holds_the_estimated_bytes(name) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    fullest = max(run_ranks(_held_bytes, 2, dtype, name))
    job = Workload(small_config("gpt"), 1, 2, 8, name)
    estimate, plain = (estimate_memory(job, Layout(dp_size=2, zero1=zero1)) for zero1 in (True, False))
    assert fullest == estimate.weights + estimate.gradients + estimate.optimizer_state
    assert estimate.optimizer_state < 0.7 * plain.optimizer_state


@pytest.mark.parametrize("dp_size", [2, 3, 5])
def test_every_owners_weights_begin_where_a_kernel_reads_16_bytes_at_once(dp_size) -> None:
    parameters = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (24, 2, 40, 8, 13, 16, 64, 8)]
    buffer = GradientBuffer(parameters, ParallelContext(dp_size=dp_size, zero1=True))
    start = buffer.weights.data_ptr()
    places = {p.numel(): (p.data_ptr() - start) % 16 for p in parameters if p.numel() % 8 == 0}
    assert set(places.values()) == {0}
    assert all((view.data_ptr() - buffer.flat.data_ptr()) % 32 == 0 for view in buffer.views if view.numel() % 8 == 0)
    assert torch.equal(torch.cat(list(parameters)), torch.ones(175, dtype=torch.bfloat16))  # no two of them overlap
