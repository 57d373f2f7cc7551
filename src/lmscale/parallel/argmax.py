"""The most probable id over a vocabulary that is cut over tensor ranks."""

import torch
from torch import Tensor

from .collectives import max_over_tensor_ranks
from .context import ParallelContext

_NO_ID = 2**53  # above every id, exact in fp64


def vocab_parallel_argmax(logits: Tensor, context: ParallelContext) -> Tensor:
    """The id of the largest logit of each row, of equal ones the smallest id.

    Shapes:
        logits [n, v/p], this rank's columns; returns int64 [n], equal on all tensor ranks.

    Communicates:
        two all-reduces (maximum) of [n] over the tensor group.
    """
    value, index = logits.max(dim=-1)  # of equal ones the first
    largest = max_over_tensor_ranks(value, context)
    ids = (index + context.tp_rank * logits.shape[-1]).double()
    ids = torch.where(value == largest, ids, float(_NO_ID))
    return -max_over_tensor_ranks(-ids, context).long()
