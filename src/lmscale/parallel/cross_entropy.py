"""Cross-entropy over a vocabulary that no rank holds whole, alone and together with the projection in front of it."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import copy_to_tensor_parallel_region, max_over_tensor_ranks, sum_over_tensor_ranks
from .context import ParallelContext

IGNORE_LABEL = -100  # the label of a position that is not scored, as in torch and transformers
LOGITS_AT_ONCE = 50 * 2**20  # of a rank in memory together: 1,024 rows of 51,200 columns, 8,192 rows of an eighth


def vocab_parallel_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int, context: ParallelContext
) -> Tensor:
    """Scores of this rank's part of the vocabulary from the tied word embedding; padded columns are -inf.

    Shapes:
        hidden [..., h]; weight [v/p, h]; bias [v/p] or None; returns [..., v/p].

    Communicates:
        forward nothing; backward one all-reduce of [..., h] over the tensor group (f). The logits are never gathered.

    Source: section 3 (output embedding). Masking the padded columns departs from Megatron-LM, which lets them compete.
    """
    hidden = copy_to_tensor_parallel_region(hidden, context)
    logits = F.linear(hidden, weight, bias)
    used = _used_columns(weight, vocab_size, context)
    if used < weight.shape[0]:
        padded = torch.arange(weight.shape[0], device=logits.device) >= used
        logits = logits.masked_fill(padded, float("-inf"))
    return logits


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, context: ParallelContext) -> Tensor:
    """Loss of each position in nats, from logits cut over the vocabulary; for evaluation, without a gradient.

    Shapes:
        logits [..., v/p], this rank's columns; labels int64 [...], ids of the whole vocabulary or -100;
        returns [...] (fp32 for half logits, else their dtype), zero where the label is -100.

    Communicates:
        three all-reduces of [...] over the tensor group (maximum; sum of exponentials; score of the target), b x s
        numbers instead of the b x s x v of gathered logits.

    Source: section 3 (output embedding).
    """
    with torch.no_grad():
        log_total, target, _, _ = _statistics(logits, labels, context, _sum_of_exponentials)
        return (log_total - target).masked_fill(labels == IGNORE_LABEL, 0.0)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocab_size: int,
    context: ParallelContext,
    compiled: bool = False,
) -> Tensor:
    """Sum of the losses in nats of rows projected on the tied word embedding, without their logits all at once.

    Rows with at most LOGITS_AT_ONCE logits of this rank are projected, scored and turned into their part of the
    gradients of `hidden`, `weight` and `bias` at a time, already in the forward pass: the gradient of a sum is known
    but for one factor, which the backward pass multiplies in. So nothing is computed twice, and the logits of all rows
    never exist.

    Shapes:
        hidden [n, h]; weight [v/p, h]; bias [v/p] or None; labels int64 [n], ids of the whole vocabulary or -100;
        returns one number (fp32 for half types). Its backward pass runs once.

    Args:
        vocab_size: columns beyond it are padding and never predicted.
        compiled: let torch.compile fuse the passes over the logits.

    Communicates:
        forward, over the tensor group, three all-reduces of [n] (maximum; sum of exponentials; score of the target),
        in pieces; backward one of [n, h] (f).

    Source: section 3 (output embedding) for the cut; gradients in the forward pass after Hsu et al. 2024 (Liger).
    """
    hidden = copy_to_tensor_parallel_region(hidden, context)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, vocab_size, context, compiled)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        context: ParallelContext,
        compiled: bool,
    ) -> Tensor:
        used = _used_columns(weight, vocab_size, context)
        wide = _wide(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        trains = any(ctx.needs_input_grad)
        if trains:
            d_hidden = torch.empty_like(hidden)
            # Sums over pieces in fp32 at least: each piece's product is rounded to the weight's type as any other.
            d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
            d_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        at_once = max(1, LOGITS_AT_ONCE // len(weight))
        for start in range(0, len(hidden), at_once):
            piece = slice(start, start + at_once)
            rows, row_labels = hidden[piece], labels[piece]
            logits = F.linear(rows, weight, bias)
            logits[:, used:] = float("-inf")
            sum_exponentials = _kernel(_sum_of_exponentials, compiled)
            log_total, target, column, is_local = _statistics(logits, row_labels, context, sum_exponentials)
            is_scored = row_labels != IGNORE_LABEL
            total += ((log_total - target) * is_scored).sum()
            if trains:
                # exp(x - inf) is 0: a row that is not scored has no gradient.
                log_total = log_total.masked_fill(~is_scored, float("inf"))
                d_logits = _kernel(_gradient_of_logits, compiled)(logits, log_total, column, is_local)
                torch.mm(d_logits, weight, out=d_hidden[piece])
                d_weight += d_logits.t() @ rows
                if d_bias is not None:
                    d_bias += d_logits.sum(dim=0, dtype=wide)
                del d_logits
            del logits  # or the next piece would be made beside this one
        if trains:
            ctx.gradients = [d_hidden, d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype)]
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the backward pass of linear_cross_entropy runs once: its gradients are given away")
        return *(None if d is None else d.mul_(grad_output) for d in gradients), None, None, None, None


def _used_columns(weight: Tensor, vocab_size: int, context: ParallelContext) -> int:
    """How many of this rank's rows of the word embedding are ids of the vocabulary; the others are padding."""
    rows = weight.shape[0]
    return min(max(vocab_size - context.tp_rank * rows, 0), rows)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # fp16 and bf16 lose the sum of 51,200 exponentials; fp32 and fp64 are used as they come.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _statistics(
    logits: Tensor, labels: Tensor, context: ParallelContext, sum_of_exponentials: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: log of the sum of exponentials, score of the target, the target's column here, whether it is here.

    Shapes:
        logits [..., v/p]; labels int64 [...]; returns four [...], the first two equal on all tensor ranks.
    """
    maximum = max_over_tensor_ranks(logits.amax(dim=-1).to(_wide(logits.dtype)), context)
    total = sum_over_tensor_ranks(sum_of_exponentials(logits, maximum), context)
    local = labels - context.tp_rank * logits.shape[-1]
    is_local = (local >= 0) & (local < logits.shape[-1])
    column = local.masked_fill(~is_local, 0)
    target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(maximum.dtype).masked_fill(~is_local, 0.0)
    return total.log() + maximum, sum_over_tensor_ranks(target, context), column, is_local


def _sum_of_exponentials(logits: Tensor, maximum: Tensor) -> Tensor:
    shifted = logits.to(_wide(logits.dtype), copy=True).sub_(maximum.unsqueeze(-1))
    return shifted.exp_().sum(dim=-1)


def _gradient_of_logits(logits: Tensor, log_total: Tensor, column: Tensor, is_local: Tensor) -> Tensor:
    """Softmax minus the target's 1, in the type of the logits."""
    gradient = logits.to(log_total.dtype, copy=True).sub_(log_total.unsqueeze(-1)).exp_()
    # One target a row, so plain scatter is enough, and unlike scatter_add it is deterministic everywhere.
    index = column.unsqueeze(-1)
    is_scored = is_local & log_total.isfinite()
    gradient.scatter_(-1, index, gradient.gather(-1, index) - is_scored.unsqueeze(-1).to(gradient.dtype))
    return gradient.to(logits.dtype)


@cache
def _kernel(function: Callable[..., Tensor], compiled: bool) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True) if compiled else function
