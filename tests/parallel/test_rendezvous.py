"""A taken MASTER_PORT ends every rank in one line, whoever listens there; so does a rank 0 that opens no store."""

import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from ranks import free_ports

from lmscale.parallel import rendezvous

HERE = "127.0.0.1"


@pytest.fixture
def open_store(monkeypatch):
    """Of rank R among two in step 0 of Slurm's job 7, uncached, with short limits."""
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)
    uncached = rendezvous._open_store.__wrapped__
    return lambda rank, port, address=HERE: uncached(address, port, rank, 2, timedelta(seconds=1))


def refused(port: int) -> str:
    return f"^`MASTER_PORT` must be free on {HERE}, the host of rank 0, but another process listens at {port}$"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_at_which_another_program_listens_ends_each_rank(rank: int, open_store) -> None:
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ValueError, match=refused(port)):
            open_store(rank, port)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_store_of_another_job_is_not_taken_for_ones_own(rank: int, open_store) -> None:
    (port,) = free_ports(1)
    lines = (
        "import sys",
        "import torch.distributed as dist",
        f"store = dist.TCPStore('{HERE}', {port}, None, True, wait_for_workers=False)",
        "store.set('6.0', '')",
        "print(flush=True)",
        "sys.stdin.read()",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=refused(port)):
            open_store(rank, port)
        other.stdin.close()


def test_ranks_of_one_job_meet(open_store) -> None:
    (port,) = free_ports(1)
    first, second = open_store(0, port), open_store(1, port)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_rank_0_that_never_listens_ends_the_others_at_the_time_limit(open_store) -> None:
    (port,) = free_ports(1)
    expected = rf"^rank 0 must listen at {HERE}:{port} \(MASTER_ADDR and MASTER_PORT\) within 0:00:01, but: Connection"
    with pytest.raises(ValueError, match=expected):
        open_store(1, port)


def test_an_address_of_another_host_ends_rank_0_in_one_line(open_store) -> None:
    (port,) = free_ports(1)
    message = rf"^rank 0 must listen at no.host.invalid:{port} \(MASTER_ADDR and MASTER_PORT\), but: [^\n]+$"
    with pytest.raises(ValueError, match=message):
        open_store(0, port, "no.host.invalid")
