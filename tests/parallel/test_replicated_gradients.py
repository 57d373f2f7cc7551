"""Gradients of replicated parameters after the tensor ranks have agreed on them."""

import pytest
import torch
from ranks import make_context, run_ranks

from lmscale.parallel import sync_replicated_gradients
from lmscale.parallel.shard_spec import parameter


def _synced(rank: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Gradients 1.5 + rank of a replicated, a partial, a sharded and an unused parameter."""
    context = make_context(tp_size=2)
    with torch.device("cpu"):
        made = [
            parameter(context, (3, 2)),
            parameter(context, (4,), grad_is_partial=True),
            parameter(context, (6,), shard_dim=0),
            parameter(context, (5,)),
        ]
    parameters = [torch.nn.Parameter(param.detach().to(dtype)) for param in made]
    for param, source in zip(parameters, made, strict=True):
        param.shard = source.shard
    for param in parameters[:3]:
        param.grad = torch.full_like(param, 1.5 + rank)
    sync_replicated_gradients(parameters[2:3], context)  # none: a data rank may own no replicated parameter
    sync_replicated_gradients(parameters, context)
    return [param.grad for param in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicated_gradients_are_rank_0s_and_partial_ones_the_sum(dtype: torch.dtype) -> None:
    for rank, (replicated, partial, sharded, unused) in enumerate(run_ranks(_synced, 2, dtype)):
        assert replicated.shape == (3, 2) and replicated.unique().tolist() == [1.5]
        assert partial.unique().tolist() == [1.5 + 2.5]
        assert sharded.unique().tolist() == [1.5 + rank] and unused is None
