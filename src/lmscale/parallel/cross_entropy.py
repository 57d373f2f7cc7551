"""Logits and cross-entropy over a vocabulary that is cut over the tensor ranks; no rank ever holds all logits.

Training uses `linear_cross_entropy` (`chunked_cross_entropy.py`), which computes both for a few rows at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from .context import ParallelContext

IGNORE_LABEL = -100  # the label of a position that is not scored, as in torch and transformers


def vocab_parallel_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int, context: ParallelContext
) -> Tensor:
    """Logits of this rank's part of the vocabulary, from the tied word embedding; padded columns are -inf.

    Shapes:
        hidden [..., h]; weight [v/p, h]; bias [v/p] or None; returns [..., v/p].

    Communicates:
        forward nothing; backward one all-reduce of [..., h] over the tensor group (f). The logits are never gathered.

    Source: section 3 (output embedding). Masking the padded columns departs from Megatron-LM, which lets them compete.
    """
    hidden = copy_to_tensor_parallel_region(hidden, context)  # f
    ids = torch.arange(len(weight), device=hidden.device) + context.tp_rank * len(weight)
    return F.linear(hidden, weight, bias).masked_fill(ids >= vocab_size, float("-inf"))


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, padded_vocab_size: int, context: ParallelContext
) -> Tensor:
    """Loss of each position in nats, from logits cut over the vocabulary.

    Shapes:
        logits [..., v/p], this rank's columns; labels int64 [...], ids of the whole vocabulary or -100;
        returns [...] (fp32 for half logits, else their dtype), zero where the label is -100.

    Communicates:
        forward three all-reduces of [...] over the tensor group (maximum; sum of exponentials; logit of the label):
        b x s numbers each, instead of the b x s x v of gathered logits; backward nothing.

    Raises:
        ValueError: logits of a different width than v/p, such as gathered ones, whose loss would be log p too high.

    Source: section 3 (output embedding).
    """
    width, share = logits.shape[-1], context.shard(padded_vocab_size)
    if width != share:
        raise ValueError(f"`logits` must have `padded_vocab_size` / `tp_size` = {share} columns, but have {width}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half types lose the sum of 51,200 terms
    maximum = context.tp_communicator.all_reduce(logits.detach().amax(dim=-1), "max")
    exponentials = (logits - maximum.unsqueeze(-1)).exp().sum(dim=-1)
    total = reduce_from_tensor_parallel_region(exponentials, context)  # g
    column, elsewhere = context.local_ids(labels, width)
    own = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    target = reduce_from_tensor_parallel_region(own.masked_fill(elsewhere, 0.0), context)  # g
    return (maximum + total.log() - target).masked_fill(labels == IGNORE_LABEL, 0.0)
