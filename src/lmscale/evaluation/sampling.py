"""Choosing the next token from logits that no rank holds whole, the same token on every tensor rank.

Each rank works on its own columns and sends the others a few numbers a row, in gathers, so that all ranks decide from
the same bytes. A sample is drawn by the Gumbel-max rule: argmax(score + noise), the noise a hash of (seed, prompt,
sample, position, token id). So no distribution is ever normalised, no generator has a state, and neither the layout nor
the other rows of a batch change a draw.

Legend: b rows, v padded vocabulary, p tensor-parallel size.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.generate import Sampling
from ..parallel import ParallelContext

FIRST_CANDIDATES, MORE_CANDIDATES = 128, 8  # of a rank, sent for top-p at first, and times as many where too few
# Odd multipliers of the finalizer of splitmix64 and of Weyl sequences, as signed numbers: torch has no uint64 products.
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_COLUMN = 0xD1B54A32D192ED03 - 2**64


def sample_key(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Key of all random numbers of one sample, a signed 64-bit hash of the seed, the prompt's ids and the sample's
    number among those of that prompt: the other prompts of a file do not matter."""
    text = f"generate/{seed}/{sample}/" + ",".join(map(str, prompt))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def choose_tokens(
    logits: Tensor, sampling: Sampling, keys: Tensor, positions: Tensor, context: ParallelContext
) -> Tensor:
    """The next token of each row.

    Shapes:
        logits [b, v/p], this rank's columns, -inf where no token may be chosen; keys int64 [b], see `sample_key`;
        positions int64 [b], of the token to come; returns int64 [b], equal on all tensor ranks.

    Communicates:
        over the tensor group, gathers from each rank: two numbers a row; with top-k or top-p also its `top_k` (or 128,
        seldom more) largest scores a row and two more numbers a row.

    Raises:
        ValueError: a row has no largest number (NaN or infinite logits).
    """
    first_id = context.tp_rank * logits.shape[-1]
    if sampling.temperature == 0:
        return _argmax(logits, first_id, context)
    # In fp64 the borders of top-k and top-p do not move with the layout's rounding of sums.
    scores = logits.double() / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        scores = _keep_most_probable(scores, sampling, context)
        rows, columns = scores.isfinite().nonzero(as_tuple=True)  # noise for those that are left: far fewer
        scores[rows, columns] += gumbel_noise(keys[rows], positions[rows], columns + first_id)
    else:
        ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
        scores = scores + gumbel_noise(keys[:, None], positions[:, None], ids)
    return _argmax(scores, first_id, context)


def gumbel_noise(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Independent numbers with the Gumbel distribution, a pure function of a key, a position and a token's id.

    Shapes:
        keys, positions, ids int64, of shapes that broadcast; returns fp64 of their common shape.

    Source: Gumbel 1954; Maddison et al. 2014, "A* sampling", for argmax(score + noise) as a draw from the softmax.
    """
    bits = _mix(_mix(_mix(keys) + positions * _GOLDEN) ^ _mix(ids * _COLUMN))
    # 52 bits and a half: fp64 holds it exactly, and it is neither 0 nor 1.
    uniform = ((bits & (2**52 - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """Avalanche the bits of int64 `x` (the finalizer of splitmix64); torch's >> keeps the sign, hence the masks."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def _argmax(scores: Tensor, first_id: int, context: ParallelContext) -> Tensor:
    """The id of the largest score of each row over all ranks, the smallest such id; [b, v/p] to int64 [b]."""
    value, index = scores.max(dim=-1)  # of equal ones the first; NaN where there is one
    best = _gather(torch.stack((value.double(), (index + first_id).double())), context)  # [p, 2, b]; ids are exact
    values, ids = best[:, 0], best[:, 1]
    largest = values.amax(dim=0)
    if not bool(largest.isfinite().all()):
        row = int((~largest.isfinite()).int().argmax())
        raise ValueError(
            f"the model's largest score must be a finite number, but is {largest[row].item()} in row {row} of the batch"
        )
    return torch.where(values == largest, ids, float("inf")).amin(dim=0).long()


def _keep_most_probable(scores: Tensor, sampling: Sampling, context: ParallelContext) -> Tensor:
    """-inf wherever top-k or top-p leaves a token out; [b, v/p] to [b, v/p]."""
    if sampling.top_k is not None:
        largest, _ = _largest(scores, sampling.top_k, context)
        largest = largest[:, : sampling.top_k]
        number = torch.full_like(largest[:, 0], largest.shape[1], dtype=torch.int64)
        if sampling.top_p < 1:
            number, _ = _fewest(largest, _masses(largest, largest[:, :1]), sampling.top_p)
    else:
        largest, number = _nucleus(scores, sampling.top_p, context)
    border = largest.gather(1, number[:, None] - 1)  # [b, 1], the score of the last token that is kept
    # Tokens that score exactly this are kept in the order of their ids, as many as there is room for.
    room = number - (largest > border).sum(dim=-1)
    is_border = scores == border
    on_ranks = _gather(is_border.sum(dim=-1), context)  # [p, b]
    room = room - on_ranks[: context.tp_rank].sum(dim=0)
    keep = (scores > border) | (is_border & (is_border.cumsum(dim=-1) <= room[:, None]))
    keep |= scores.isnan()  # to be refused
    return scores.masked_fill(~keep, float("-inf"))


def _nucleus(scores: Tensor, top_p: float, context: ParallelContext) -> tuple[Tensor, Tensor]:
    """The largest scores of each row in order, far enough down for top-p, and how many of them it keeps."""
    maximum = _gather(scores.amax(dim=-1), context).amax(dim=0)[:, None]  # [b, 1]
    total = _gather((scores - maximum).exp().sum(dim=-1), context).sum(dim=0)[:, None]  # [b, 1], one order of adding
    count = FIRST_CANDIDATES
    while True:
        largest, reach = _largest(scores, count, context)
        number, found = _fewest(largest, (largest - maximum).exp() / total, top_p)
        border = largest.gather(1, number[:, None] - 1)[:, 0]
        # Below `reach` a rank may hold scores that it has not sent.
        if count >= scores.shape[-1] or bool((found & (border >= reach)).all()):
            return largest, number
        count *= MORE_CANDIDATES


def _masses(largest: Tensor, maximum: Tensor) -> Tensor:
    """Probabilities among these scores alone."""
    weights = (largest - maximum).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def _fewest(largest: Tensor, masses: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """How many of the first of each row are needed for a mass of `top_p` (int64 [b]), and whether they reach it."""
    reached = masses.cumsum(dim=-1)
    before = torch.cat((torch.zeros_like(reached[:, :1]), reached[:, :-1]), dim=-1)
    number = ((before < top_p) & largest.isfinite()).sum(dim=-1)  # padded columns never count
    number = number.clamp(min=1)  # of rows that are not numbers, which are refused later
    return number, reached.gather(1, number[:, None] - 1)[:, 0] >= top_p


def _largest(scores: Tensor, count: int, context: ParallelContext) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of every rank together, in falling order [b, p x count], and the score of each row
    down to which nothing is missing [b]."""
    local = scores.topk(min(count, scores.shape[-1]), dim=-1).values
    gathered = _gather(local, context)  # [p, b, count]
    reach = gathered[:, :, -1].amax(dim=0)
    merged = gathered.transpose(0, 1).flatten(1)
    return merged.sort(dim=-1, descending=True).values, reach


def _gather(x: Tensor, context: ParallelContext) -> Tensor:
    """`x` of every tensor rank, [p, ...]."""
    if context.tp_size == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(context.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=context.tp_group)
    return torch.stack(parts)
