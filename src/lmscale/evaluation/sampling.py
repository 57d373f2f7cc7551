"""Choose the next token from vocabulary-parallel logits; the result is the same on every tensor rank.

Each rank processes its own columns and all-gathers a few numbers per row, so all ranks decide from the same bytes. A
sample is drawn with the Gumbel-max trick: argmax(score + noise), where the noise is a hash of (seed, prompt, sample,
position, token id). No distribution has to be normalized and no generator has state, so neither the layout nor the
other rows of a batch change a draw.

Legend: b rows, v padded vocabulary, p tensor-parallel size.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.generate import Sampling
from ..parallel import ParallelContext

FIRST_CANDIDATES, MORE_CANDIDATES = 128, 8  # candidates per rank for top-p, and the factor if they do not suffice
# Odd multipliers of the SplitMix64 finalizer and of Weyl sequences, as signed numbers: torch has no uint64 products.
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_COLUMN = 0xD1B54A32D192ED03 - 2**64


def sample_key(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Return the key of all random numbers of one sample, independent of the other prompts of a file.

    It is a signed 64-bit hash of the seed, the prompt's ids and the sample's number within the prompt.
    """
    text = f"generate/{seed}/{sample}/" + ",".join(map(str, prompt))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def choose_tokens(
    logits: Tensor, sampling: Sampling, keys: Tensor, positions: Tensor, context: ParallelContext
) -> Tensor:
    """Choose the next token of each row.

    Shapes:
        logits [b, v/p], this rank's columns, -inf for excluded tokens; keys int64 [b], see `sample_key`; positions
        int64 [b], of the next token; returns int64 [b], equal on all tensor ranks.

    Communicates:
        over the tensor group, all-gathers of two numbers per row; with top-k or top-p also of `top_k` (or 128, rarely
        more) largest scores and two more numbers per row.

    Raises:
        ValueError: a row has no finite maximum (NaN or infinite logits).
    """
    first_id = context.tp_rank * logits.shape[-1]
    if sampling.temperature == 0:
        return _argmax(logits, first_id, context)
    # In fp64 the cutoffs of top-k and top-p do not depend on the layout's rounding of sums.
    scores = logits.double() / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        scores = _keep_most_probable(scores, sampling, context)
        rows, columns = scores.isfinite().nonzero(as_tuple=True)  # noise only for the few remaining tokens
        scores[rows, columns] += gumbel_noise(keys[rows], positions[rows], columns + first_id)
    else:
        ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
        scores = scores + gumbel_noise(keys[:, None], positions[:, None], ids)
    return _argmax(scores, first_id, context)


def gumbel_noise(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Compute independent Gumbel noise, a pure function of key, position and token id.

    Shapes:
        keys, positions, ids int64, of shapes that broadcast; returns fp64 of their common shape.

    Source: Gumbel 1954; Maddison et al. 2014, "A* sampling", for argmax(score + noise) as a draw from the softmax.
    """
    bits = _mix(_mix(_mix(keys) + positions * _GOLDEN) ^ _mix(ids * _COLUMN))
    # 52 bits plus 1/2: exact in fp64, and never 0 or 1.
    uniform = ((bits & (2**52 - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int64 `x` (the SplitMix64 finalizer); torch's >> keeps the sign, hence the masks."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def _argmax(scores: Tensor, first_id: int, context: ParallelContext) -> Tensor:
    """Return the id of each row's largest score over all ranks (ties: the smallest id); [b, v/p] to int64 [b]."""
    value, index = scores.max(dim=-1)  # ties: the first; NaN if there is one
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
    """Set scores to -inf for tokens excluded by top-k or top-p; [b, v/p] to [b, v/p]."""
    if sampling.top_k is not None:
        largest, _ = _largest(scores, sampling.top_k, context)
        largest = largest[:, : sampling.top_k]
        number = torch.full_like(largest[:, 0], largest.shape[1], dtype=torch.int64)
        if sampling.top_p < 1:
            number, _ = _fewest(largest, _masses(largest, largest[:, :1]), sampling.top_p)
    else:
        largest, number = _nucleus(scores, sampling.top_p, context)
    cutoff = largest.gather(1, number[:, None] - 1)  # [b, 1], the lowest score that is kept
    # Of the tokens with exactly this score, those with the smallest ids are kept, until `number` is reached.
    num_tied = number - (largest > cutoff).sum(dim=-1)
    is_tied = scores == cutoff
    on_ranks = _gather(is_tied.sum(dim=-1), context)  # [p, b]
    num_tied = num_tied - on_ranks[: context.tp_rank].sum(dim=0)
    keep = (scores > cutoff) | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied[:, None]))
    keep |= scores.isnan()  # raises an error later
    return scores.masked_fill(~keep, float("-inf"))


def _nucleus(scores: Tensor, top_p: float, context: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return enough of each row's largest scores for top-p, in order, and how many of them it keeps."""
    maximum = _gather(scores.amax(dim=-1), context).amax(dim=0)[:, None]  # [b, 1]
    # [b, 1], summed in the same order on all ranks.
    total = _gather((scores - maximum).exp().sum(dim=-1), context).sum(dim=0)[:, None]
    count = FIRST_CANDIDATES
    while True:
        largest, reach = _largest(scores, count, context)
        number, found = _fewest(largest, (largest - maximum).exp() / total, top_p)
        cutoff = largest.gather(1, number[:, None] - 1)[:, 0]
        # A rank may hold scores below `reach` that it has not sent.
        if count >= scores.shape[-1] or bool((found & (cutoff >= reach)).all()):
            return largest, number
        count *= MORE_CANDIDATES


def _masses(largest: Tensor, maximum: Tensor) -> Tensor:
    """Return the probabilities normalized over these scores."""
    weights = (largest - maximum).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def _fewest(largest: Tensor, masses: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return how many of each row's first masses sum to `top_p` (int64 [b]), and whether they reach it."""
    reached = masses.cumsum(dim=-1)
    before = torch.cat((torch.zeros_like(reached[:, :1]), reached[:, :-1]), dim=-1)
    number = ((before < top_p) & largest.isfinite()).sum(dim=-1)  # padded columns never count
    number = number.clamp(min=1)  # rows of NaN raise an error later
    return number, reached.gather(1, number[:, None] - 1)[:, 0] >= top_p


def _largest(scores: Tensor, count: int, context: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores of all ranks, descending [b, p x count], and each row's score down to which
    they are complete [b]."""
    local = scores.topk(min(count, scores.shape[-1]), dim=-1).values
    gathered = _gather(local, context)  # [p, b, count]
    reach = gathered[:, :, -1].amax(dim=0)
    merged = gathered.transpose(0, 1).flatten(1)
    return merged.sort(dim=-1, descending=True).values, reach


def _gather(x: Tensor, context: ParallelContext) -> Tensor:
    """All-gather `x` over the tensor ranks, [p, ...]."""
    if context.tp_size == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(context.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=context.tp_group)
    return torch.stack(parts)
