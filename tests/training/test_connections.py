"""The connections of many ranks: open files, votes across hosts, and a time limit longer than that of the watchdog."""

import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import warm
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from ranks import fake_world, free_ports, run_ranks, torchrun_rank

from lmscale.config import Layout
from lmscale.parallel import make_context
from lmscale.runtime.ranks import make_ranks
from lmscale.training import strategy as strategy_module
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
    ranks, sent = make_ranks(2, timedelta(minutes=1)), []

    def recorded(name: str) -> Callable[..., None]:
        original = getattr(dist, name)

        def record(*arguments, group, **options) -> None:
            sent.append((name, dist.get_world_size(group)))
            original(*arguments, group=group, **options)

        return record

    dist.all_reduce, dist.broadcast = recorded("all_reduce"), recorded("broadcast")
    found = [ranks.any(rank == voter, False) for voter in range(6)]
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
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert os.environ == {"NCCL_RUNTIME_CONNECT": "0"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LIMIT = TensorParallelStrategy(timeout_minutes=45).collective_timeout


def limits(rank: int) -> list[timedelta]:
    context = make_context(Layout(tp_size=2, dp_size=2), "cpu", LIMIT)
    groups = context.tp_group, context.dp_group
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_tensor_and_data_groups_wait_longer_than_the_watchdog() -> None:
    assert timedelta(minutes=45) < LIMIT
    assert run_ranks(limits, 4) == [[LIMIT, LIMIT]] * 4


PER_HOST = 4


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
def test_every_rank_makes_the_same_groups_and_splits_none(num_hosts: int, monkeypatch) -> None:
    """Hosts of 4 GPUs, tensor groups of 2 and 2 stages, with the default group bound to a GPU as after its start."""
    world_size, counts = num_hosts * PER_HOST, Counter()
    c10d, new_group = dist.distributed_c10d, dist.new_group

    def counted(ranks=None, *_: object, backend: str | None = None, **__: object) -> object:
        counts["groups"] += 1
        return new_group(ranks, backend="fake")

    for module in (c10d, dist, torch.distributed.device_mesh):
        monkeypatch.setattr(module, "new_group", counted)
    source = SimpleNamespace(perform_nocolor_split=lambda device: counts.update(["splits"]))
    monkeypatch.setattr(c10d, "_get_split_source", lambda group: source)
    on_cpu = lambda layout, _, timeout, *__: make_context(layout, "cpu", timeout, False)  # noqa: E731
    monkeypatch.setattr(strategy_module, "make_context", on_cpu)
    monkeypatch.setattr(TensorParallelStrategy, "root_device", torch.device("cuda", 0))
    of_ranks = []
    for rank in range(world_size):
        counts.clear()
        with fake_world(rank, world_size):
            c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
            strategy = TensorParallelStrategy(tp_size=2, pp_size=2)
            places = {"global_rank": rank, "local_rank": rank % PER_HOST, "world_size": world_size}
            strategy.cluster_environment = SimpleNamespace(**{name: lambda n=n: n for name, n in places.items()})
            strategy.parallel_devices, strategy._num_nodes = [torch.device("cuda", 0)] * PER_HOST, num_hosts
            strategy._make_groups()
        of_ranks.append(dict(counts))
    mesh, control, of_hosts = 4 + 2 * num_hosts + 2 * num_hosts, 1, num_hosts + 1 if num_hosts > 1 else 0
    assert of_ranks == [{"groups": mesh + control + of_hosts}] * world_size


def two_jobs_at_one_address(rank: int, port: int) -> tuple[list[float], bool]:
    """Each with a process group of its own, bound to a device as on GPUs, and the groups of the grid.

    Returns what the jobs summed, and whether no rank found in its store what the ranks of an earlier job left there.
    """
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= torchrun_rank(rank, 2) | {"MASTER_PORT": str(port)}
    torch.accelerator.is_available, torch.accelerator.current_accelerator = lambda: True, lambda: torch.device("cpu")
    start = dist.init_process_group

    def bound(*arguments: object, **options: object) -> None:
        ranks_here.append(options["store"].add("ranks", 1))
        start(*arguments, **options)
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)

    dist.init_process_group, sums, ranks_here = bound, [], []
    for job in range(2):
        strategy = TensorParallelStrategy(tp_size=2, timeout_minutes=0.5, shared_memory=False)
        strategy.cluster_environment = TorchElasticEnvironment()
        strategy.parallel_devices = [torch.device("cpu")] * 2
        strategy.setup_distributed()
        strategy._make_groups()
        total = torch.ones(1) + job
        dist.all_reduce(total, group=strategy.parallel.tp_group)
        sums.append(total.item())
        dist.destroy_process_group()
    return sums, max(ranks_here) <= 2


def test_the_second_job_of_ranks_that_were_started_outside_makes_its_groups() -> None:
    assert run_ranks(two_jobs_at_one_address, 2, *free_ports(1)) == [([2.0, 4.0], True)] * 2
