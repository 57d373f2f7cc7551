"""Collective backends: how to add one, what every one computes, and that the data group reaches its ranks alone."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from ranks import make_context, run_ranks
from torch import Tensor

from lmscale.parallel import (
    ColumnParallelLinear,
    Communicator,
    ParallelContext,
    ProcessGroupCommunicator,
    RowParallelLinear,
    SharedMemoryChannel,
    SingleRankCommunicator,
    begin_gather_from_data_ranks,
    begin_sum_over_data_ranks,
    initialize_parameters,
    sum_over_data_ranks,
)

B, S, H, FFN = 3, 4, 6, 10


class CountingCommunicator(Communicator):
    """An example of adding a backend: counts the bytes that another backend communicates."""

    backend = "counting"

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.num_bytes = inner, 0

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        self.num_bytes += x.nbytes
        return self.inner.all_reduce(x, operation)

    def all_gather(self, x: Tensor) -> Tensor:
        whole = self.inner.all_gather(x)
        self.num_bytes += whole.nbytes
        return whole

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.num_bytes += x.nbytes
        return self.inner.reduce_scatter(x)


def run_mlp(context: ParallelContext) -> list[Tensor]:
    """Output and input gradient of a column-parallel and a row-parallel linear layer, in fp64."""
    up, down = ColumnParallelLinear(H, FFN, context, 0.5), RowParallelLinear(FFN, H, context, 0.5)
    model = torch.nn.ModuleList((up, down)).double()
    initialize_parameters(model, 7, context)
    s = S // context.tp_size if context.sequence_parallel else S
    x = torch.randn(B, s, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = down(up(x).relu())
    y.square().sum().backward()
    return [y.detach(), x.grad]


def _count_bytes(rank: int) -> list[tuple[bool, int]]:
    context, found = make_context(tp_size=2), []
    for sequence_parallel in (False, True):
        plain = dataclasses.replace(context, sequence_parallel=sequence_parallel)
        counting = CountingCommunicator(context.tp_communicator)
        counted = dataclasses.replace(plain, tp_communicator=counting)
        pairs = zip(run_mlp(plain), run_mlp(counted), strict=True)
        found.append((all(torch.equal(a, b) for a, b in pairs), counting.num_bytes))
    return found


def test_a_new_backend_is_one_class_and_carries_the_bytes_of_a_layer() -> None:
    whole = B * S * H * 8
    # Without sequence parallelism: g forward and f backward. With it: an all-gather and a reduce-scatter in each pass,
    # and the column-parallel layer gathers its input again in the backward pass.
    assert run_ranks(_count_bytes, 2) == [[(True, 2 * whole), (True, 5 * whole)]] * 2


def _compare_with_definitions(rank: int, size: int) -> list[str]:
    group = dist.group.WORLD
    shared = make_context(tp_size=size).tp_communicator
    for communicator in (shared, ProcessGroupCommunicator(group, size)):
        inputs = [torch.arange(4 * 3 * 5, dtype=torch.float64).view(4, 3, 5) * (r + 1) for r in range(size)]
        own, total = inputs[rank], sum(inputs)
        assert torch.equal(communicator.all_reduce(own), total)
        assert torch.equal(communicator.all_reduce(own, "max"), inputs[-1])
        assert torch.equal(communicator.begin_all_reduce(own.clone())(), total)
        whole, part = torch.cat(inputs), total.chunk(size)[rank]
        assert torch.equal(communicator.all_gather(own), whole)
        assert torch.equal(communicator.begin_all_gather(own)(), whole)
        assert torch.equal(communicator.reduce_scatter(own), part)
        assert torch.equal(communicator.begin_reduce_scatter(own.clone())(), part)
        assert torch.equal(own, torch.arange(4 * 3 * 5, dtype=torch.float64).view(4, 3, 5) * (rank + 1))
    return [type(shared).__name__, ProcessGroupCommunicator(group, size).backend]


@pytest.mark.parametrize("size", [2, 4])
def test_every_backend_computes_the_definitions_of_its_collectives(size: int) -> None:
    assert run_ranks(_compare_with_definitions, size, size) == [[SharedMemoryChannel.__name__, "gloo"]] * size


def test_a_single_rank_gets_its_input_back() -> None:
    x, communicator = torch.randn(2, 3), ParallelContext().tp_communicator
    assert isinstance(communicator, SingleRankCommunicator)
    results = communicator.all_reduce(x), communicator.all_gather(x), communicator.reduce_scatter(x)
    assert all(result is x for result in results)


def test_a_context_without_a_group_has_the_shapes_of_one_rank() -> None:
    context = ParallelContext(tp_rank=3, tp_size=5)
    layer = ColumnParallelLinear(H, FFN, context, 0.5)
    assert layer(torch.zeros(B, S, H)).shape == (B, S, FFN // 5)
    assert RowParallelLinear(FFN, H, context, 0.5).weight.shape == (H, FFN // 5)


def _on_a_rank(rank: int, dtype: torch.dtype) -> list[list[float]]:
    context = make_context(tp_size=2, dp_size=2)  # tensor ranks are neighbours: data groups 0, 2 and 1, 3
    values = [torch.tensor([1.0, 2.0], dtype=dtype) * 4**rank for _ in range(4)]
    sum_over_data_ranks(values[0], context)
    begin_sum_over_data_ranks(values[1], context).wait()
    begin_sum_over_data_ranks(values[2], dataclasses.replace(context, zero1=True)).wait()
    values[2][1 - context.dp_rank] = 0
    begin_gather_from_data_ranks(values[3], context).wait()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_gathers_are_over_the_data_group(dtype) -> None:
    assert run_ranks(_on_a_rank, 4, dtype) == [
        [[17.0, 34.0], [17.0, 34.0], [17.0, 0.0], [1.0, 32.0]],
        [[68.0, 136.0], [68.0, 136.0], [68.0, 0.0], [4.0, 128.0]],
        [[17.0, 34.0], [17.0, 34.0], [0.0, 34.0], [1.0, 32.0]],
        [[68.0, 136.0], [68.0, 136.0], [0.0, 136.0], [4.0, 128.0]],
    ]
