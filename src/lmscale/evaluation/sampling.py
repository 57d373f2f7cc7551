"""Choose the next token from vocabulary-parallel logits; the result is the same on every tensor rank.

All ranks gather the logits of one position per row and decide from the same bytes. A sample is drawn with the
Gumbel-max trick: argmax(score + noise), where the noise is a hash of (seed, prompt, sample, position, token id). No
generator has state, so neither the layout nor the other rows of a batch change a draw.

Legend: b rows, v padded vocabulary, p tensor-parallel size.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.generate import Sampling
from ..hashing import SIGNED_GOLDEN, mix_signed
from ..parallel import ParallelContext

_COLUMN = 0xD1B54A32D192ED03 - 2**64  # odd multiplier of a Weyl sequence, as `SIGNED_GOLDEN`


def sample_key(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Return the key of all random numbers of one sample, independent of the other prompts of a file.

    It is a signed 64-bit hash of the seed, the prompt's ids and the sample's number within the prompt.
    """
    text = f"generate/{seed}/{sample}/" + ",".join(map(str, prompt))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def choose_tokens(
    logits: Tensor, sampling: Sampling, keys: Tensor, positions: Tensor, context: ParallelContext
) -> Tensor:
    """Choose the next token of each row; of equal scores the smallest id counts as the larger.

    Shapes:
        logits [b, v/p], this rank's columns, -inf for excluded tokens; keys int64 [b], see `sample_key`; positions
        int64 [b], of the next token; returns int64 [b], equal on all tensor ranks.

    Communicates:
        over the tensor group, one all-gather of the logits.

    Raises:
        ValueError: a row has no finite maximum (NaN or infinite logits).
    """
    by_rank = context.tp_communicator.all_gather(logits).unflatten(0, (context.tp_size, -1))  # [p, b, v/p]
    # In fp64 the cutoffs of top-k and top-p do not depend on rounding.
    scores = by_rank.transpose(0, 1).flatten(1).double()  # [b, v]
    largest, greedy = scores.max(dim=-1)  # ties: the first; NaN if there is one
    if not bool(largest.isfinite().all()):
        row = int((~largest.isfinite()).int().argmax())
        raise ValueError(
            f"the model's largest score must be a finite number, but is {largest[row].item()} in row {row} of the batch"
        )
    if sampling.temperature == 0:
        return greedy
    scores = scores / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        scores = _keep_most_probable(scores, sampling)
    rows, columns = scores.isfinite().nonzero(as_tuple=True)  # noise only for tokens that can be drawn
    scores[rows, columns] += gumbel_noise(keys[rows], positions[rows], columns)
    return scores.argmax(dim=-1)


def gumbel_noise(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Compute independent Gumbel noise, a pure function of key, position and token id.

    Shapes:
        keys, positions, ids int64, of shapes that broadcast; returns fp64 of their common shape.

    Source: Gumbel 1954; Maddison et al. 2014, "A* sampling", for argmax(score + noise) as a draw from the softmax.
    """
    bits = mix_signed(mix_signed(mix_signed(keys) + positions * SIGNED_GOLDEN) ^ mix_signed(ids * _COLUMN))
    # 52 bits plus 1/2: exact in fp64, and never 0 or 1.
    uniform = ((bits & (2**52 - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _keep_most_probable(scores: Tensor, sampling: Sampling) -> Tensor:
    """Set scores to -inf for tokens excluded by top-k or top-p; [b, v] to [b, v]."""
    if sampling.top_k is not None:
        cutoff = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        is_above, is_tied = scores > cutoff, scores == cutoff
        num_tied = sampling.top_k - is_above.sum(dim=-1, keepdim=True)
        scores = scores.masked_fill(~is_above & ~(is_tied & (is_tied.cumsum(dim=-1) <= num_tied)), float("-inf"))
    if sampling.top_p < 1:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        excluded = torch.zeros_like(ids, dtype=torch.bool)
        excluded[:, 1:] = ordered.softmax(dim=-1).cumsum(dim=-1)[:, :-1] >= sampling.top_p
        scores = scores.scatter(1, ids, ordered.masked_fill(excluded, float("-inf")))
    return scores
