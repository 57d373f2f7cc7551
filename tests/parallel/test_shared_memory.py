"""All-reduces through shared memory: the numbers of gloo, whatever the sizes, and an error where a rank is missing."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lmscale.parallel import shared_memory
from lmscale.parallel.shared_memory import SharedMemoryChannel, open_channel

MINUTE = timedelta(minutes=1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def open_here(timeout: timedelta = MINUTE) -> SharedMemoryChannel:
    channel = open_channel(dist.group.WORLD, timeout)
    assert channel is not None
    return channel


def random_tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Odd, empty, of no dimension, transposed, strided, and of more than two and a half pieces."""
    generator = torch.Generator().manual_seed(rank)
    pieces = 5 * shared_memory.SLOT_BYTES // (2 * dtype.itemsize) + 3
    sizes = [(), (1,), (0, 3), (13, 7), (5, 13, 24), (pieces,)]
    tensors = [torch.randn(size, generator=generator).mul(100).to(dtype) for size in sizes]
    return [*tensors, tensors[3].t(), tensors[4][:, ::2]]


def _compare_with_gloo(rank: int) -> None:
    shared_memory.SLOT_BYTES = 4096
    channel, size = open_here(), dist.get_world_size()
    for dtype in DTYPES:
        for x in random_tensors(rank, dtype):
            before = x.clone()
            found = {name: channel.all_reduce(x, name) for name in ("sum", "max")}
            assert torch.equal(x, before) and all(y.is_contiguous() for y in found.values())
            everybody = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(everybody, x.contiguous())
            total = everybody[0].clone()
            for other in everybody[1:]:
                total += other
            assert torch.equal(found["sum"], total)
            for name, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
                expected = x.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(expected, operation)
                if size == 2 or name == "max" or dtype == torch.int64:  # more ranks are added in another order by gloo
                    assert torch.equal(found[name], expected), (dtype, x.shape, name)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_sum_is_that_of_the_ranks_in_their_order_and_gloo_s(size: int) -> None:
    run_ranks(_compare_with_gloo, size)
