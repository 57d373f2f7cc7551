"""Parallel linear layers and biases: plain versions equal torch, and every faster version equals the plain one."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks import make_context, run_ranks
from sharding import largest, local_part
from torch import Tensor, nn

from lmscale.parallel import (
    ColumnParallelLinear,
    ParallelContext,
    RowParallelLinear,
    gather_sequence,
    initialize_parameters,
    sequence_shard,
)
from lmscale.parallel import bias as biases
from lmscale.parallel.fast_linear import overlapped_column_linear, row_linear, sequence_parallel_column_linear

BOUND = 1e-12
B, S, WIDE, NARROW = 3, 4, 10, 6  # WIDE is the dimension that is sharded


def make_layer(kind: type, context: ParallelContext) -> nn.Module:
    """A plain layer in fp64; its random logical weights and biases are the same at every layout."""
    sizes = (NARROW, WIDE) if kind is ColumnParallelLinear else (WIDE, NARROW)
    layer = kind(*sizes, context, 0.5).double()
    for param in layer.parameters():
        param.shard = dataclasses.replace(param.shard, init="normal", std=0.5)
    initialize_parameters(layer, 7, context)
    layer.implementation = None
    return layer


def make_tensors(kind: type) -> tuple[Tensor, Tensor]:
    """The full input and the full gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    x, d_y = (torch.randn(B, S, n, dtype=torch.float64, generator=generator) for n in (NARROW, WIDE))
    return (x, d_y) if kind is ColumnParallelLinear else (d_y, x)


def columns(x: Tensor, context: ParallelContext) -> Tensor:
    return x.chunk(context.tp_size, dim=-1)[context.tp_rank]


def run(forward, layer: nn.Module, x: Tensor, d_y: Tensor) -> dict[str, Tensor]:
    """Output and gradients of `forward(x)`."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = forward(x)
    y.backward(d_y)
    return {"output": y.detach(), "input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert all(found[name].shape == expected[name].shape for name in expected)
    return largest((found[name] - expected[name]).abs().max() for name in expected)


def of_one_process(kind: type, context: ParallelContext) -> dict[str, Tensor]:
    """Expected output and gradients of a rank of `context`, by F.linear on one process."""
    layer, shard = make_layer(kind, ParallelContext()), make_layer(kind, context)
    whole = run(lambda x: F.linear(x, layer.weight, layer.bias), layer, *make_tensors(kind))
    cut = "output" if kind is ColumnParallelLinear else "input"
    parts = {name: local_part(whole[name], getattr(shard, name), context) for name in ("weight", "bias")}
    return whole | parts | {cut: columns(whole[cut], context)}


def inputs_of_a_rank(kind: type, context: ParallelContext) -> tuple[Tensor, Tensor]:
    x, d_y = make_tensors(kind)
    return (x, columns(d_y, context)) if kind is ColumnParallelLinear else (columns(x, context), d_y)


def plain_against_one_process(kind: type, context: ParallelContext) -> float:
    layer = make_layer(kind, context)
    return largest_difference(run(layer, layer, *inputs_of_a_rank(kind, context)), of_one_process(kind, context))


def fast_against_plain(kind: type, context: ParallelContext) -> float:
    layer, fast = make_layer(kind, context), overlapped_column_linear if kind is ColumnParallelLinear else row_linear
    inputs = inputs_of_a_rank(kind, context)
    found = run(lambda x: fast(x, layer.weight, layer.bias, context), layer, *inputs)
    return largest_difference(found, run(layer, layer, *inputs))


def sequence_parallel_against_plain(kind: type, context: ParallelContext) -> float:
    """With sequence parallelism, against the plain layer between a gather and a cut of the tokens."""
    cut = dataclasses.replace(context, sequence_parallel=True)
    layer, (x, d_y) = make_layer(kind, context), inputs_of_a_rank(kind, context)
    if kind is ColumnParallelLinear:
        x = sequence_shard(x, cut)
        expected = run(lambda x: layer(gather_sequence(x, cut)), layer, x, d_y)
        found = run(lambda x: sequence_parallel_column_linear(x, layer.weight, layer.bias, cut), layer, x, d_y)
        return largest_difference(found, expected)
    expected = run(layer, layer, x, d_y)
    expected["output"] = sequence_shard(expected["output"], cut)
    found = run(lambda x: row_linear(x, layer.weight, layer.bias, cut), layer, x, sequence_shard(d_y, cut))
    found["bias"] = context.tp_communicator.all_reduce(found["bias"])  # of this rank's tokens (`grad_is_partial`)
    return largest_difference(found, expected)


COMPARISONS = (plain_against_one_process, fast_against_plain, sequence_parallel_against_plain)
KINDS = (ColumnParallelLinear, RowParallelLinear)


def _compare(rank: int) -> dict[str, float]:
    context = make_context(tp_size=2)
    over_gloo = dataclasses.replace(context, tp_communicator=None)
    cases = [(where, compare, kind) for where in (context, over_gloo) for compare in COMPARISONS for kind in KINDS]
    return {
        f"{where.tp_communicator.backend}: {compare.__name__} of {kind.__name__}": compare(kind, where)
        for where, compare, kind in cases
    }


def test_two_ranks_equal_one_process_in_every_version() -> None:
    for found in run_ranks(_compare, 2):
        assert len(found) == 2 * len(COMPARISONS) * len(KINDS)
        assert {name: value for name, value in found.items() if not value < BOUND} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_equals_torchs_linear_in_every_version(kind: type) -> None:
    assert plain_against_one_process(kind, ParallelContext()) < BOUND
    assert fast_against_plain(kind, ParallelContext()) < BOUND


@pytest.mark.parametrize(
    "context, column, row",
    [
        (ParallelContext(), None, None),
        (ParallelContext(tp_size=2), overlapped_column_linear, None),
        (ParallelContext(tp_size=2, sequence_parallel=True), sequence_parallel_column_linear, row_linear),
    ],
)
def test_each_context_gets_the_fastest_version(context: ParallelContext, column, row) -> None:
    for kind, expected in ((ColumnParallelLinear, column), (RowParallelLinear, row)):
        fast = kind(WIDE, WIDE, context, 0.5).implementation
        assert (fast and fast.func) is expected


@pytest.mark.parametrize("by_sample", [False, True])
def test_results_and_gradients_are_those_of_torch(by_sample: bool, monkeypatch) -> None:
    monkeypatch.setattr(biases, "_sums_by_sample", lambda x: by_sample)
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, 4), (5, 4), (5,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    factors = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((F.linear(x, weight, bias) * factors).sum(), (x, weight, bias))
    for y in (biases.linear(x, weight, bias), biases.add_bias(F.linear(x, weight), bias)):
        torch.testing.assert_close(y, F.linear(x, weight, bias))
        torch.testing.assert_close(torch.autograd.grad((y * factors).sum(), (x, weight, bias)), wanted)


def test_only_code_compiled_for_a_gpu_sums_sample_by_sample(monkeypatch) -> None:
    def samples(dim: int, is_cuda: bool) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=is_cuda, dim=lambda: dim)

    assert not biases._sums_by_sample(samples(3, True))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [biases._sums_by_sample(samples(dim, True)) for dim in (2, 3, 4)] == [False, True, False]
    assert not biases._sums_by_sample(samples(3, False))


def test_rows_without_samples_are_summed() -> None:
    torch.testing.assert_close(biases.sum_rows(torch.ones(4, 3)), torch.full((3,), 4.0))
