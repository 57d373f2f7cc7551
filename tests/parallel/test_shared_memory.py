"""Collectives through shared memory: equal to gloo for all sizes, and an error if a rank is missing."""

import dataclasses
import errno
import itertools
import os
import signal
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from collective_trace import CollectiveRecorder
from ranks import make_context, run_ranks
from sharding import random_batch, random_model, small_config, total_loss
from torch import Tensor

from lmscale.parallel import ParallelContext, SharedMemoryChannel, open_channel, shared_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
MINUTE = timedelta(minutes=1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def random_tensors(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Scalar, odd, empty, two and a half pieces (flat and per row), transposed and strided tensors."""
    generator = torch.Generator().manual_seed(rank)
    pieces = 5 * shared_memory.SLOT_BYTES // (2 * dtype.itemsize) + 3
    sizes = [(), (1,), (0, 3), (13, 7), (5, 13, 24), (pieces,), (3, pieces)]
    tensors = [torch.randn(size, generator=generator).mul(100).to(dtype) for size in sizes]
    return [*tensors, tensors[3].t(), tensors[4][:, ::2]]


def in_rank_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other
    return total


def _compare(rank: int) -> None:
    """Compare each collective with its definition over all ranks' inputs, and with gloo."""
    shared_memory.SLOT_BYTES = 4096
    channel, size = open_channel(dist.group.WORLD, MINUTE), dist.get_world_size()
    patient = open_channel(dist.group.WORLD, MINUTE + timedelta(days=1))
    for peer in patient._peers.values():
        assert struct.unpack("ll", peer.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)) == (86_460, 0)
    for dtype in DTYPES:
        for tensors in zip(*(random_tensors(other, dtype) for other in range(size)), strict=True):
            own, before = tensors[rank], tensors[rank].clone()
            found = {name: channel.all_reduce(own, name) for name in OPERATIONS}
            assert torch.equal(found["sum"], in_rank_order(tensors))
            for name, operation in OPERATIONS.items():
                expected = own.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(expected, operation)
                if size == 2 or name == "max":  # gloo sums more ranks in a different order
                    assert torch.equal(found[name], expected), (dtype, own.shape, name)
            assert torch.equal(own, before)
            if own.ndim:
                assert torch.equal(channel.all_gather(own), torch.cat(tensors))
                scaled = torch.cat([(part + 1) * own for part in range(size)])
                part = in_rank_order([(rank + 1) * x for x in tensors])
                assert torch.equal(channel.reduce_scatter(scaled), part)
                swapped = scaled.transpose(0, -1).contiguous().transpose(0, -1)
                assert torch.equal(channel.reduce_scatter(swapped), part)
    _reduce_often(rank, size, channel)


def _reduce_often(rank: int, size: int, channel: SharedMemoryChannel) -> None:
    """10,000 collectives in sequence, to detect a slot that is written too early or read too late."""
    for number in range(10_000 if size == 2 else 1_000):
        total = channel.all_reduce(torch.full((1 + number % 5,), number * (rank + 1)))
        assert (total == number * size * (size + 1) // 2).all()


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_results_equal_their_definitions_and_gloo(size: int) -> None:
    run_ranks(_compare, size)


def _train(context: ParallelContext, dtype: torch.dtype) -> tuple[list[Tensor], list[tuple]]:
    """Loss and gradients of a step, and its collectives."""
    model = random_model(small_config("gpt", max_position_embeddings=12), context).to(dtype)
    with CollectiveRecorder(context) as recorder:
        loss = total_loss(model, random_batch(model.config))
        recorder.phase = "backward"
        loss.backward()
    sent = [(c.kind, c.group, c.phase, c.num_bytes) for c in recorder.collectives]
    return [loss.detach(), *(param.grad for param in model.parameters())], sent


def _train_both_ways(rank: int) -> None:
    context = make_context(tp_size=2)
    assert isinstance(context.tp_communicator, SharedMemoryChannel)
    for sequence_parallel, dtype in itertools.product((False, True), (torch.float64, torch.bfloat16)):
        here = dataclasses.replace(context, sequence_parallel=sequence_parallel)
        numbers, sent = _train(here, dtype)
        gloo_s, sent_by_gloo = _train(dataclasses.replace(here, tp_communicator=None), dtype)
        assert all(torch.equal(x, y) for x, y in zip(numbers, gloo_s, strict=True))
        assert sent == sent_by_gloo and len(sent) > 10


def test_a_model_is_bitwise_equal_to_gloo_with_the_same_collectives() -> None:
    run_ranks(_train_both_ways, 2)


def _miss_each_other(rank: int, folder: str) -> None:
    """Channels with different failures; rank 0 writes the error messages."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    told = []
    for how in ("other size", "other type", "late", "killed"):
        channel = open_channel(dist.group.WORLD, timedelta(seconds=2 if how == "late" else 60))
        channel.all_reduce(torch.ones(3))
        if how == "killed" and rank == 1:
            if os.fork() == 0:  # like a data loader process that outlives its rank
                time.sleep(8)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late" and rank == 1:
            time.sleep(4)
        started = time.monotonic()
        try:
            dtype = torch.int32 if how == "other type" and rank == 1 else torch.float32
            channel.all_reduce(torch.ones(3 + rank if how == "other size" else 3, dtype=dtype))
        except RuntimeError as error:
            told.append(str(error) + (" too late" if time.monotonic() - started > 6 else ""))
        if how != "killed":
            dist.barrier()
    Path(folder, "told").write_text("\n".join(told))
    os._exit(0)  # gloo would wait for rank 1


def test_a_missing_rank_raises_with_its_number_and_leaves_no_files(tmp_path) -> None:
    started = mp.start_processes(_miss_each_other, (str(tmp_path),), 2, join=False, start_method="forkserver")
    processes = started.processes
    for process in processes:
        process.join(timeout=120)
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    differ = (
        "all ranks of the group must send the same, but rank 0 has 12 bytes for sum of torch.float32 and rank 1 has "
    )
    assert (tmp_path / "told").read_text().splitlines() == [
        differ + "16 bytes",
        differ + "another purpose",
        "rank 1 of the group has not come for 2 s",
        "rank 1 of the group is gone",
    ]
    names = [f"lmscale-{process.pid}-" for process in processes]
    there = Path("/proc/net/unix").read_text() + " ".join(os.listdir("/dev/shm"))
    assert not any(name in there for name in names)


def test_ranks_on_different_hosts_have_no_channel() -> None:
    run_ranks(_open_apart, 2)


def _open_apart(rank: int) -> None:
    gather = shared_memory.gather_objects
    # As on another host, where the socket names do not exist.
    shared_memory.gather_objects = lambda item, group: [
        f"{x} there" if isinstance(x, str) else x for x in gather(item, group)
    ]
    assert open_channel(dist.group.WORLD, MINUTE) is None
    shared_memory.gather_objects = gather
    assert open_channel(dist.group.WORLD, MINUTE) is not None


def test_memory_that_cannot_be_made_is_refused_on_all_ranks() -> None:
    run_ranks(_open_without_memory, 2)


def _open_without_memory(rank: int) -> None:
    def refuse(*_) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    for failing, module, name in ((0, os, "memfd_create"), (0, os, "ftruncate"), (1, shared_memory, "mmap")):
        with pytest.MonkeyPatch.context() as patched:
            if rank == failing:
                patched.setattr(module, name, refuse)
            with pytest.raises(shared_memory.SharedMemoryError, match=r"^`parallel.shared_memory` must .*too large"):
                open_channel(dist.group.WORLD, MINUTE)
    assert open_channel(dist.group.WORLD, MINUTE) is not None


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_layer_is_compiled_without_a_graph_break(sequence_parallel: bool) -> None:
    torch.compiler.reset()  # other tests have used up the limit of graphs per function
    # One of two ranks; the other contributes zeros without waiting.
    memory = torch.zeros(2, 2, shared_memory.SLOT_BYTES, dtype=torch.uint8)
    channel = SharedMemoryChannel("alone", 0, {}, memory, MINUTE)
    context = ParallelContext(tp_size=2, tp_communicator=channel, sequence_parallel=sequence_parallel)
    model = random_model(small_config("gpt", max_position_embeddings=12), context)
    layer, results = model.transformer.layers[0], []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 5 * 6 * 24, dtype=torch.float64).view(5, 6, 24).requires_grad_()
        y = run(x, None, None, None)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)
