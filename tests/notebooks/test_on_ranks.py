"""The processes of notebook 00: results and counted messages of every rank, and an end in every case."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
sys.path.insert(0, str(FOLDER))

import on_ranks as module  # noqa: E402
from on_ranks import on_ranks, part  # noqa: E402

from lmscale.parallel import reduce_from_tensor_parallel_region as g  # noqa: E402


def children() -> list[int]:
    """Ids of the ranks that run now."""
    return [p.pid for processes in module._processes_of.values() for p in processes.processes]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_ranks_compute_a_notebooks_tensors_and_every_message_is_counted() -> None:
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)

    @on_ranks(2, 4)
    def product(context):
        partial = part(x, 1, context) @ part(w, 0, context)
        return {"total": g(partial, context), "part of x": part(x, 1, context), "partial": partial}

    shown = product.differences(**{"total": x @ w, "part of x": x, "partial": x @ w})
    assert (shown.loc[["total", "part of x"]] == "< 1e-12").to_numpy().all()
    assert all(float(value) > 1e-3 for value in shown.loc["partial"])  # one rank's part of the sum is not the sum
    (row,) = product.messages().to_dict("records")
    sent = {"phase": "forward", "message": "all-reduce", "shape": [3, 5], "bytes": 120}
    assert row == sent | {"2 ranks": 1, "4 ranks": 1}
    assert product.ring_bytes().loc["forward"].tolist() == [120.0, 180.0]


def test_a_grid_has_neighbours_in_its_tensor_groups() -> None:
    @on_ranks(2, dp_size=2)
    def places(context):
        group = torch.distributed.get_process_group_ranks
        return group(context.tp_group), group(context.dp_group), (context.dp_rank, context.tp_rank)

    assert places[2].results == [
        ([0, 1], [0, 2], (0, 0)),
        ([0, 1], [1, 3], (0, 1)),
        ([2, 3], [0, 2], (1, 0)),
        ([2, 3], [1, 3], (1, 1)),
    ]


def test_a_rank_that_fails_ends_the_others_and_the_next_function_runs() -> None:
    def one_fails(context):
        if context.tp_rank == 1:
            raise ArithmeticError("seven")
        return g(torch.ones(1), context)  # waits for the other

    on_ranks(2)(lambda context: None)
    before = children()
    with pytest.raises(RuntimeError, match="(?s)rank 1 failed.*ArithmeticError: seven"):
        on_ranks(2)(one_fails)
    assert len(before) == 4 and wait_for_the_end(before)
    assert on_ranks(2)(lambda context: context.tp_rank)[2].results == [0, 1]


def test_ranks_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(2)(lambda context: None)
    before = children()
    monkeypatch.setattr(module, "TIMEOUT_S", 1)
    with pytest.raises(RuntimeError, match="on 2 ranks took longer than 1 s"):
        on_ranks(2)(lambda context: time.sleep(60))
    assert wait_for_the_end(before)


@pytest.mark.slow
def test_ranks_end_with_a_notebook_that_is_killed() -> None:
    code = (
        "import on_ranks\n"
        "on_ranks.on_ranks(2)(lambda context: None)\n"
        "print(*(p.pid for p in on_ranks._processes().processes), flush=True)\n"
        "on_ranks.on_ranks(2)(lambda context: __import__('time').sleep(60))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=FOLDER, stdout=subprocess.PIPE, text=True) as notebook:
        pids = [int(pid) for pid in notebook.stdout.readline().split()]
        os.kill(notebook.pid, signal.SIGKILL)
    assert len(pids) == 4 and wait_for_the_end(pids)
