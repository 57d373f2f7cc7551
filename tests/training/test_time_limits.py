"""Every group of ranks has the time limit of `parallel.timeout_minutes`, so that the watchdog ends a hung run first."""

from datetime import timedelta

import torch
from runs import run_jobs, tiny_run

from lmscale.training.strategy import TensorParallelStrategy


def check_limits(rank: int) -> None:
    set_up = TensorParallelStrategy.setup_environment

    def set_up_and_check(strategy: TensorParallelStrategy) -> None:
        set_up(strategy)
        assert strategy.collective_timeout > timedelta(minutes=45)
        for group in (strategy.parallel.tp_group, strategy.parallel.dp_group):
            limit = group._get_backend(torch.device("cpu")).options._timeout
            assert limit == strategy.collective_timeout, limit

    TensorParallelStrategy.setup_environment = set_up_and_check


def test_tensor_and_data_groups_wait_as_long_as_the_world(tmp_path) -> None:
    layout = {"parallel__tp_size": 2, "parallel__dp_size": 2, "parallel__timeout_minutes": 45}
    run_jobs([tiny_run("gpt", tmp_path, trainer__max_steps=1, **layout)], 4, fault=check_limits)
