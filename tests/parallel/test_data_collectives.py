"""Collectives of the data group reach its ranks and no others."""

import torch
from ranks import make_context, run_ranks

from lmscale.parallel import begin_sum_over_data_ranks, broadcast_from_data_ranks, sum_over_data_ranks


def _on_a_rank(rank: int) -> list[float]:
    context = make_context(tp_size=2, dp_size=2)  # tensor ranks are neighbours: data groups 0, 2 and 1, 3
    values = [torch.tensor([10.0**rank]) for _ in range(3)]
    sum_over_data_ranks(values[0], context)
    begin_sum_over_data_ranks(values[1], context).wait()
    begin_sum_over_data_ranks(values[2], context, owner=1).wait()
    if context.dp_rank != 1:
        values[2].zero_()
    parts = [torch.tensor([10.0**rank]) for _ in range(2)]
    broadcast_from_data_ranks(parts, context)
    return [float(value) for value in (*values, *parts)]


def test_sums_and_broadcasts_are_over_the_data_group() -> None:
    assert run_ranks(_on_a_rank, 4) == [
        [101.0, 101.0, 0.0, 1.0, 100.0],
        [1010.0, 1010.0, 0.0, 10.0, 1000.0],
        [101.0, 101.0, 101.0, 1.0, 100.0],
        [1010.0, 1010.0, 1010.0, 10.0, 1000.0],
    ]
