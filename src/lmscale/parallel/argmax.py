"""The most probable id over a vocabulary that is cut over the tensor ranks."""

import torch
from torch import Tensor

from .context import ParallelContext

_NO_ID = 2**53  # above every id, exact in fp64


def vocab_parallel_argmax(logits: Tensor, context: ParallelContext) -> Tensor:
    """The id of the largest logit of each row; ties go to the smallest id.

    Shapes:
        logits [n, v/p], this rank's columns; returns int64 [n], equal on all tensor ranks.

    Communicates:
        two all-reduces (maximum) of [n] over the tensor group.
    """
    value, index = logits.max(dim=-1)  # ties: the first
    largest = context.tp_communicator.all_reduce(value, "max")
    ids = (index + context.tp_rank * logits.shape[-1]).double()
    ids = torch.where(value == largest, ids, float(_NO_ID))
    return -context.tp_communicator.all_reduce(-ids, "max").long()
