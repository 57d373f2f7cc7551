"""The connections of many ranks: open files, votes across hosts, and a time limit longer than that of the watchdog."""

import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import warm
from ranks import run_ranks

from lmscale.config import Layout
from lmscale.parallel import make_context
from lmscale.training.strategy import FULL_MESH, TensorParallelStrategy, prepare_connections

NUM_RANKS, NUM_FILES = 32, 24  # a full mesh of 32 needs 31 sockets


def connect(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    prepare_connections(NUM_RANKS)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    open_files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + NUM_FILES,) * 2)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, store=store)
    vote = torch.tensor([float(rank)])
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    dist.broadcast(vote, src=0)
    dist.all_gather_object([None] * NUM_RANKS, rank)
    assert vote.item() == NUM_RANKS - 1
    Path(folder, f"{rank}").touch()
    dist.barrier()
    os._exit(0)  # without the teardown of 32 interpreters


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_32_ranks_vote_within_a_file_limit_that_a_full_mesh_exceeds(tmp_path) -> None:
    ranks = [warm.context.Process(target=connect, args=(rank, str(tmp_path))) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * NUM_RANKS and all((tmp_path / f"{rank}").exists() for rank in range(NUM_RANKS))


def vote_on_three_hosts(rank: int) -> tuple[list[tuple[str, int]], list[list[bool]]]:
    """The collectives of one vote with their numbers of ranks, and what each vote gave."""
    strategy, sent = TensorParallelStrategy(timeout_minutes=1), []
    places = {"global_rank": rank, "local_rank": rank % 2, "world_size": 6}
    strategy.cluster_environment = SimpleNamespace(**{name: lambda n=n: n for name, n in places.items()})
    strategy.make_host_groups(2)

    def recorded(name: str) -> Callable[..., None]:
        original = getattr(dist, name)

        def record(*arguments, group, **options) -> None:
            sent.append((name, dist.get_world_size(group)))
            original(*arguments, group=group, **options)

        return record

    dist.all_reduce, dist.broadcast = recorded("all_reduce"), recorded("broadcast")
    found = [strategy.any_rank(rank == voter, False) for voter in range(6)]
    return sent[: len(sent) // 6], found


def test_a_vote_of_several_hosts_sends_no_message_through_all_ranks() -> None:
    for rank, (sent, found) in enumerate(run_ranks(vote_on_three_hosts, 6)):
        leader = [("all_reduce", 3)] * (rank % 2 == 0)
        assert sent == [("all_reduce", 2), *leader, ("broadcast", 2)]
        assert found == [[True, False]] * 6  # whichever rank voted


def test_few_ranks_keep_a_full_mesh_and_the_file_limit_is_raised(monkeypatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(os, "environ", {})
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        prepare_connections(FULL_MESH)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard) and not os.environ
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LIMIT = TensorParallelStrategy(timeout_minutes=45).collective_timeout


def limits(rank: int) -> list[timedelta]:
    context = make_context(Layout(tp_size=2, dp_size=2).axes, "cpu", LIMIT)
    groups = context.tp_group, context.dp_group
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_tensor_and_data_groups_wait_longer_than_the_watchdog() -> None:
    assert timedelta(minutes=45) < LIMIT
    assert run_ranks(limits, 4) == [[LIMIT, LIMIT]] * 4
