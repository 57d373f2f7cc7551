"""The collectives of `ProcessGroupCommunicator` against torch.distributed's, in eager and in compiled code."""

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, make_context, run_ranks
from sharding import compiler, largest, small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmscale.kernels import Kernels
from lmscale.models import build_model
from lmscale.parallel import ColumnParallelLinear, ParallelContext, ProcessGroupCommunicator, RowParallelLinear

B, S, H = 6, 8, 10


def _own(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _differences(rank: int) -> list[str]:
    communicator, found = ProcessGroupCommunicator(dist.group.WORLD, 2), []
    for dtype in (torch.float32, torch.bfloat16):
        for x in (_own(rank, dtype), _own(rank, dtype).transpose(0, 2)):
            before = x.clone()
            for operation, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
                expected = x.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(expected, op=op)
                if not torch.equal(communicator.all_reduce(x, operation), expected):
                    found.append(f"{operation} in {dtype}")
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
            dist.all_gather(parts, x.contiguous())
            if not torch.equal(communicator.all_gather(x), torch.cat(parts)):
                found.append(f"all-gather in {dtype}")
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total)
            if not torch.equal(communicator.reduce_scatter(x), total.chunk(2)[rank]):
                found.append(f"reduce-scatter in {dtype}")
            if not torch.equal(x, before):
                found.append(f"the input changed in {dtype}")
    return found


def test_results_are_bit_equal_to_those_of_torch_distributed() -> None:
    assert run_ranks(_differences, 2) == [[], []]


class _Copies(TorchDispatchMode):
    """Counts the numbers that are copied, without those of the collectives themselves."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.number += result.numel()
        return result


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_sequence_parallelism_copies_nothing_around_its_collectives(kind: type) -> None:
    with fake_world(1, 2):
        context = ParallelContext(1, 2, tp_group=dist.group.WORLD, sequence_parallel=True)
        layer = kind(H, H, context, 0.5)
        x = torch.zeros((B, S // 2, H) if kind is ColumnParallelLinear else (B, S, H // 2), requires_grad=True)
        with _Copies() as copies:
            y = layer(x)
            y.backward(torch.zeros_like(y))
        assert copies.number == 0


def _wait_for_a_late_rank(rank: int) -> tuple[int, int]:
    """Ticks of another thread while rank 0 waits a second; collectives that torch still holds afterwards."""
    communicator, ticks, done = ProcessGroupCommunicator(dist.group.WORLD, 2), [], threading.Event()

    def tick() -> None:
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    wait = communicator.begin_all_reduce(_own(rank, torch.float32))
    start = time.monotonic()
    wait()
    end = time.monotonic()
    done.set()
    thread.join()
    return sum(start < moment < end for moment in ticks), torch._C._distributed_c10d._get_work_registry_size()


def test_a_wait_blocks_no_other_thread_and_nothing_is_held_after_it() -> None:
    (ticks, held), (_, held_by_other) = run_ranks(_wait_for_a_late_rank, 2)
    assert ticks >= 5  # the watchdog is such a thread
    assert (held, held_by_other) == (0, 0)


def _compiled_against_eager(rank: int, backend: str, sequence_parallel: bool, batch_halves: bool) -> tuple[float, int]:
    """Largest difference of output and gradients, and the number of graph breaks; in fp64, over gloo."""
    changes = {"sequence_parallel": sequence_parallel, "batch_halves": batch_halves, "tp_communicator": None}
    context = dataclasses.replace(make_context(tp_size=2), **changes)
    # Not sdpa, whose compiled backward pass torch 2.11 refuses in fp64 on a CPU.
    config = small_config("gpt", num_layers=1, hidden_dropout=0.1, attention="exact")
    results = []
    for compiles in (False, True):
        model = build_model(config, context, seed=3, dtype=torch.float64, kernels=Kernels(compiles=compiles))
        s = 12 // 2 if sequence_parallel else 12
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(4, s, config.hidden_size, dtype=torch.float64, generator=generator).requires_grad_()
        layer = model.transformer.layers[0]
        with compiler(backend):
            y = layer(x, None, torch.arange(12, dtype=torch.int32).view(3, 4))
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *(param.grad for param in layer.parameters())])
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    pairs = zip(*results, strict=True)
    return largest((a - b).abs().max() for a, b in pairs), breaks


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sequence_parallel", "batch_halves"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_layer_over_gloo_equals_the_eager_one(
    sequence_parallel: bool, batch_halves: bool, backend: str
) -> None:
    for difference, breaks in run_ranks(_compiled_against_eager, 2, backend, sequence_parallel, batch_halves):
        assert difference < 1e-12 and breaks == 0
