"""Collectives of the data group reach its ranks and no others."""

import dataclasses

import pytest
import torch
from ranks import make_context, run_ranks

from lmscale.parallel import begin_sum_over_data_ranks, gather_from_data_ranks, sum_over_data_ranks


def _on_a_rank(rank: int, dtype: torch.dtype) -> list[list[float]]:
    context = make_context(tp_size=2, dp_size=2)  # tensor ranks are neighbours: data groups 0, 2 and 1, 3
    values = [torch.tensor([1.0, 2.0], dtype=dtype) * 4**rank for _ in range(4)]
    sum_over_data_ranks(values[0], context)
    begin_sum_over_data_ranks(values[1], context).wait()
    begin_sum_over_data_ranks(values[2], dataclasses.replace(context, zero1=True)).wait()
    values[2][1 - context.dp_rank] = 0
    gather_from_data_ranks(values[3], context)
    return [value.tolist() for value in values]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_gathers_are_over_the_data_group(dtype) -> None:
    assert run_ranks(_on_a_rank, 4, dtype) == [
        [[17.0, 34.0], [17.0, 34.0], [17.0, 0.0], [1.0, 32.0]],
        [[68.0, 136.0], [68.0, 136.0], [68.0, 0.0], [4.0, 128.0]],
        [[17.0, 34.0], [17.0, 34.0], [0.0, 34.0], [1.0, 32.0]],
        [[68.0, 136.0], [68.0, 136.0], [0.0, 136.0], [4.0, 128.0]],
    ]
