"""ZeRO stage 1: the same run with the optimizer state sharded over the data ranks, and its checkpoints."""

import dataclasses
from collections import Counter

import pytest
import torch
from collective_trace import KINDS, CollectiveRecorder
from ranks import make_context, run_ranks
from runs import read_rows, read_tensors, run_jobs, tiny_run
from sharding import random_batch, small_config, total_loss
from torch import nn

from lmscale import partition
from lmscale.config import Layout
from lmscale.config.training import OptimizerConfig, PrecisionConfig
from lmscale.models import build_model
from lmscale.parallel import ParallelContext
from lmscale.parallel.shard_spec import ShardSpec
from lmscale.partition import plan_buffer
from lmscale.planner.communication import step_collectives
from lmscale.planner.memory import estimate_memory
from lmscale.planner.workload import Workload
from lmscale.training.step.gradient_buffer import GradientBuffer
from lmscale.training.step.optimizer import MixedPrecisionAdamW
from lmscale.training.step.training_module import DTYPES


@pytest.mark.parametrize("num_cuts", [1, 2, 3, 7])
def test_all_data_ranks_update_equally_many_elements_in_whole_rows(monkeypatch, num_cuts) -> None:
    monkeypatch.setattr(partition, "PIECE_ELEMENTS", 1000)
    sizes, row_lengths = [61 * 48, 48, 2, 48 * 96, 5, 96], [48, 96]
    plan = plan_buffer(sizes, row_lengths, num_cuts, zero1=True)
    assert plan.width == 16 and plan.piece_size % (num_cuts * plan.width) == 0
    assert all(start % plan.width == 0 for start in plan.starts)
    ends = [start + size for start, size in zip(plan.starts, sizes, strict=True)]
    assert all(end <= start for start, end in zip(plan.starts, ends[1:], strict=False))  # the last is first
    assert -(-max(ends) // plan.piece_size) == plan.num_pieces  # none is padding alone
    assert max(ends) - sum(sizes) < len(sizes) * plan.width


@pytest.mark.parametrize(
    ("architecture", "dtype", "moments"),
    [
        pytest.param("gpt", "fp32", "fp32", marks=pytest.mark.slow),
        ("bert", "bf16", "bf16"),
        ("gpt", "fp16", "fp32"),
    ],
)
def test_zero1_does_not_change_the_run(tmp_path, architecture, dtype, moments) -> None:
    """Sums over two ranks have one order: without clipping, whose norm has other partial sums, all bits are equal."""
    settings = {
        "parallel__dp_size": 2,
        "precision__dtype": dtype,
        "optimizer__moments": moments,
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
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-6)
    tensors, others = read_tensors(plain), read_tensors(cut)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(others[key], tensor, rtol=0, atol=0 if exact else 1e-6, msg=key)


def _train(context: ParallelContext, dtype: str, moments: str) -> MixedPrecisionAdamW:
    """Three updates of a small model; in fp16 the second overflows on data rank 1 and is skipped."""
    model = build_model(small_config("bert"), context, seed=4, dtype=DTYPES[dtype])
    config = OptimizerConfig(lr=1e-2, max_grad_norm=None, moments=moments)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), config, PrecisionConfig(dtype, 1024.0), context)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.start_grad_sync()
        batch = random_batch(model.config, seed=10 * context.dp_rank + step)
        overflows = dtype == "fp16" and (context.dp_rank, step) == (1, 1)
        (total_loss(model, batch) * (optimizer.counters.loss_scale / 100) * (1e9 if overflows else 1.0)).backward()
        optimizer.reduce_gradients()
        optimizer.step()
    return optimizer


def _compare(rank: int, dp_size: int) -> dict[tuple[str, str], tuple[float, bool, int]]:
    """By type, of the weights and moments: the largest difference from a run without ZeRO-1, relative to the largest
    number of the tensor, whether other moments are loaded and gathered to the bit, and the number of pieces."""
    partition.PIECE_ELEMENTS = 1000
    plain, found = make_context(1, dp_size), {}
    for types in [("fp64", "fp32"), ("fp16", "fp32"), ("bf16", "bf16")]:
        whole, cut = (_train(dataclasses.replace(plain, zero1=zero1), *types) for zero1 in (False, True))
        expected, counters = whole.tensors(), cut.counters.read()
        assert counters.num_skipped == whole.counters.read().num_skipped == (types[0] == "fp16")
        gathered = cut.whole_tensors(expected)
        errors = [((gathered[k] - x).abs().max() / x.abs().max().clamp(min=1e-30)).item() for k, x in expected.items()]
        others = {key: (x + 1).flip(0) for key, x in expected.items() if key.startswith("exp_avg")}
        cut.load_moments(cut.state_dict(), lambda key, out, others=others: out.copy_(others[key]))
        again = cut.whole_tensors(others)
        same = again.keys() == others.keys() and all(torch.equal(again[key], others[key]) for key in others)
        found[types] = max(errors), same, len(cut.own["model"])
    return found


@pytest.mark.parametrize("dp_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_cutting_parameters_changes_neither_updates_nor_what_is_saved_and_loaded(dp_size) -> None:
    """With pieces of 1,000 elements. Sums over two ranks have one order; over more it depends on the pieces' sizes, and
    AdamW magnifies the difference."""
    for found in run_ranks(_compare, dp_size, dp_size):
        for types, (error, same, num_pieces) in found.items():
            assert same and num_pieces > 10, types
            assert error <= (0 if dp_size == 2 else 1e-10 if types[0] == "fp64" else 0.02), types


def _updated(rank: int) -> list[tuple[list[str], torch.Tensor]]:
    """One parameter on two data ranks after one update, in fp32 and bf16: what this rank updates, its new weight."""
    context = dataclasses.replace(make_context(1, 2), zero1=True)
    return [_update(rank, name, context) for name in ("fp32", "bf16")]


def _update(rank: int, name: str, context: ParallelContext) -> tuple[list[str], torch.Tensor]:
    param = torch.nn.Parameter(torch.ones(2, 4, dtype=DTYPES[name]))
    param.shard = ShardSpec((2, 4), None, "ones")
    optimizer = MixedPrecisionAdamW([("w", param)], OptimizerConfig(lr=0.1), PrecisionConfig(name, 1.0), context)
    (param * (rank + 1)).sum().backward()
    optimizer.reduce_gradients()
    optimizer.step()
    return optimizer.names, param.detach().float()


def test_a_rank_that_has_only_padding_receives_the_update() -> None:
    for (updated, weight), (none, other) in zip(*run_ranks(_updated, 2), strict=True):
        assert (updated, none) == (["w"], [])
        assert torch.equal(weight, other) and torch.allclose(weight, torch.tensor(0.9), atol=0.01)


def _held_bytes(rank: int, dtype: torch.dtype, name: str, dp_size: int) -> tuple[int, Counter]:
    """Bytes of weights, gradients and state after an update, and its collectives over the data group."""
    context = dataclasses.replace(make_context(1, dp_size), zero1=True)
    model = build_model(small_config("gpt"), context, seed=1, dtype=dtype)
    precision = PrecisionConfig(name, initial_loss_scale=1.0)
    optimizer = MixedPrecisionAdamW(model.named_parameters(), OptimizerConfig(lr=1e-3), precision, context)
    torch.stack([param.double().sum() for param in model.parameters()]).sum().backward()
    with CollectiveRecorder(context) as recorder:
        optimizer.reduce_gradients()
        optimizer.step()
    held = [*model.parameters(), *optimizer.tensors().values(), optimizer.buffer.flat]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values()), Counter((c.kind, c.num_bytes) for c in recorder.collectives)


@pytest.mark.parametrize(("name", "dp_size"), [("fp32", 2), ("bf16", 3)])
def test_every_rank_holds_the_estimated_bytes_and_issues_the_collectives_of_the_formula(name, dp_size) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    found = run_ranks(_held_bytes, dp_size, dtype, name, dp_size)
    job = Workload(small_config("gpt"), 1, dp_size, 8, name)
    layout, plain = (Layout(dp_size=dp_size, zero1=zero1) for zero1 in (True, False))
    estimate = estimate_memory(job, layout)
    assert estimate.optimizer_state < 1.05 / dp_size * estimate_memory(job, plain).optimizer_state
    formula = [c for c in step_collectives(job, layout) if c.group == "data"]
    expected = Counter({(KINDS[c.kind], c.num_bytes): c.count for c in formula})
    num_bytes = estimate.weights + estimate.gradients + estimate.optimizer_state
    assert all(num_bytes <= held < 1.01 * num_bytes and sent == expected for held, sent in found)


@pytest.mark.parametrize("dp_size", [2, 3, 5])
def test_parameters_and_parts_begin_where_a_kernel_reads_16_bytes_at_once(dp_size) -> None:
    sizes = 24, 2, 40, 8, 13, 16, 64, 8
    parameters = [nn.Parameter(torch.ones(n, 4, dtype=torch.bfloat16)) for n in sizes]
    buffer = GradientBuffer(
        dict(zip("abcdefgh", parameters, strict=True)),
        ParallelContext(dp_size=dp_size, dp_rank=dp_size - 1, zero1=True),
    )
    for flat in (buffer.weights, buffer.flat):
        tensors = [
            *(parameters if flat is buffer.weights else buffer.views.values()),
            *buffer.part_views(buffer.own(flat)),
        ]
        assert all((tensor.data_ptr() - flat.data_ptr()) % 16 == 0 for tensor in tensors)
    assert torch.equal(torch.cat(parameters), torch.ones(sum(sizes), 4, dtype=torch.bfloat16))  # none overlap
