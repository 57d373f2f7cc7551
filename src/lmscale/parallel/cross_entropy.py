"""Cross-entropy over a vocabulary that no rank holds whole, alone and together with the projection in front of it."""

from collections.abc import Callable
from functools import cache
from typing import Any

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
        log_total, target, _, _ = _statistics(logits, labels, context)
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
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, vocab_size, context, compiled, trains)


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
        trains: bool,
    ) -> Tensor:
        used = _used_columns(weight, vocab_size, context)
        wide = _wide(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        pieces = _pieces(len(hidden), len(weight))
        buffer = torch.empty(pieces[0].stop if pieces else 0, len(weight), dtype=weight.dtype, device=weight.device)
        d_weight = d_bias = None
        if trains:
            d_hidden = torch.empty_like(hidden)
            d_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        for piece in pieces:
            rows, row_labels = hidden[piece], labels[piece]
            logits = _project(rows, weight, bias, buffer)
            logits[:, used:] = float("-inf")
            log_total, target, column, is_local = _statistics(logits, row_labels, context, compiled)
            is_scored = row_labels != IGNORE_LABEL
            total += ((log_total - target) * is_scored).sum()
            if not trains:
                continue
            # exp(x - inf) is 0: a row that is not scored has no gradient.
            log_total = log_total.masked_fill(~is_scored, float("inf"))
            d_logits = _logits_to_gradient(logits, log_total, target, column, is_local, compiled)
            torch.mm(d_logits, weight, out=d_hidden[piece])
            d_weight = _add_product(d_weight, d_logits, rows, len(pieces) > 1, compiled)
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0, dtype=wide)
        if trains:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
            ctx.gradients = [d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype)]
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the backward pass of linear_cross_entropy runs once: its gradients are given away")
        return *(None if d is None else d.mul_(grad_output) for d in gradients), None, None, None, None, None


def _used_columns(weight: Tensor, vocab_size: int, context: ParallelContext) -> int:
    """How many of this rank's rows of the word embedding are ids of the vocabulary; the others are padding."""
    rows = weight.shape[0]
    return min(max(vocab_size - context.tp_rank * rows, 0), rows)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # fp16 and bf16 lose the sum of 51,200 exponentials; fp32 and fp64 are used as they come.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _pieces(num_rows: int, num_columns: int) -> list[slice]:
    """Rows with at most LOGITS_AT_ONCE logits, at least one, at a time; the first piece is the longest."""
    at_once = max(1, LOGITS_AT_ONCE // num_columns)
    return [slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)]


def _project(rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Logits of a piece, in the memory that all pieces share: fresh memory costs a CPU as much as the product."""
    out = buffer[: len(rows)]
    return torch.mm(rows, weight.t(), out=out) if bias is None else torch.addmm(bias, rows, weight.t(), out=out)


def _add_product(total: Tensor | None, d_logits: Tensor, rows: Tensor, more: bool, compiled: bool) -> Tensor:
    """The weight's gradient with that of one more piece, summed in fp32 at least where there are several."""
    product = d_logits.t() @ rows  # of the weight's type, as any product
    if total is None:
        return product.to(_wide(product.dtype)) if more else product
    return _kernel(_add_in_place, compiled)(total, product)


def _add_in_place(total: Tensor, part: Tensor) -> Tensor:
    return total.add_(part)


def _statistics(
    logits: Tensor, labels: Tensor, context: ParallelContext, compiled: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: log of the sum of exponentials, score of the target, the target's column here, whether it is here.

    Shapes:
        logits [..., v/p]; labels int64 [...]; returns four [...], the first two equal on all tensor ranks.
    """
    own_maximum, own_total = _kernel(_maximum_and_sum, compiled)(logits)
    maximum = max_over_tensor_ranks(own_maximum, context)
    # A rank that holds padding alone has -inf as its maximum, and nothing to add.
    own_total = torch.where(own_maximum == float("-inf"), 0.0, own_total * (own_maximum - maximum).exp())
    total = sum_over_tensor_ranks(own_total, context)
    local = labels - context.tp_rank * logits.shape[-1]
    is_local = (local >= 0) & (local < logits.shape[-1])
    column = local.masked_fill(~is_local, 0)
    target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(maximum.dtype).masked_fill(~is_local, 0.0)
    return total.log() + maximum, sum_over_tensor_ranks(target, context), column, is_local


def _maximum_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the maximum and the sum of exp(x - maximum), in fp32 at least."""
    maximum = logits.amax(dim=-1).to(_wide(logits.dtype))
    shifted = logits.to(maximum.dtype, copy=True).sub_(maximum.unsqueeze(-1))
    return maximum, shifted.exp_().sum(dim=-1)


def _logits_to_gradient(
    logits: Tensor, log_total: Tensor, target: Tensor, column: Tensor, is_local: Tensor, compiled: bool
) -> Tensor:
    """Softmax minus the target's 1, in the place of the logits."""
    gradient = _kernel(_softmax_in_place, compiled)(logits, log_total)
    # The target's own element apart, in full precision: one number a row, where a scatter in the pass over all of them
    # would keep the compiler from fusing it.
    rows = torch.arange(len(gradient), device=gradient.device)
    of_target = ((target - log_total).exp() - log_total.isfinite().to(target.dtype)).to(gradient.dtype)
    gradient[rows, column] = torch.where(is_local, of_target, gradient[rows, column])
    return gradient


def _softmax_in_place(logits: Tensor, log_total: Tensor) -> Tensor:
    wide = logits.to(log_total.dtype, copy=True).sub_(log_total.unsqueeze(-1)).exp_()
    return logits.copy_(wide)


@cache
def _kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if compiled else function
