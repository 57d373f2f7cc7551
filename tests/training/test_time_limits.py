"""Every group of ranks has the time limit of `parallel.timeout_minutes`, so that the watchdog ends a hung run first."""

from datetime import timedelta

import torch
from ranks import run_ranks

from lmscale.config import Layout
from lmscale.parallel import make_context
from lmscale.training.strategy import TensorParallelStrategy

LIMIT = TensorParallelStrategy(timeout_minutes=45).collective_timeout


def limits(rank: int) -> list[timedelta]:
    context = make_context(Layout(tp_size=2, dp_size=2).axes, "cpu", LIMIT)
    groups = context.tp_group, context.dp_group
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_tensor_and_data_groups_wait_longer_than_the_watchdog() -> None:
    assert timedelta(minutes=45) < LIMIT
    assert run_ranks(limits, 4) == [[LIMIT, LIMIT]] * 4
