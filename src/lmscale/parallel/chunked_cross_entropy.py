"""The output projection and its loss together, computed for a few rows at a time to save memory.

The full logits are never materialized. The loss and gradients equal those of `vocab_parallel_logits` and
`vocab_parallel_cross_entropy`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..partition import rows_at_once
from .collectives import copy_to_tensor_parallel_region
from .context import ParallelContext
from .cross_entropy import IGNORE_LABEL
from .distillation import SoftTargets, maxima, mixed_gradient, sums, used_columns, wide_type


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocab_size: int,
    context: ParallelContext,
    compiled: bool = False,
    targets: SoftTargets | None = None,
) -> Tensor:
    """Sum of the losses in nats of rows projected on the tied word embedding, computed chunk by chunk.

    A chunk has the rows that `rows_at_once` allows. The forward pass projects a chunk, computes its loss and already
    adds its part of the gradients of `hidden`, `weight` and `bias`: the gradient of a sum is known except for one
    factor, which the backward pass multiplies in. Nothing is computed twice.

    Shapes:
        hidden [n, h]; weight [v/p, h]; bias [v/p] or None; labels int64 [n], ids of the whole vocabulary or -100;
        returns one number (fp32 for half types), with `targets` [2]: of the labels, and T^2 KL(teacher || student). Its
        backward pass can run once.

    Args:
        vocab_size: columns from here on are padding and are never predicted.
        compiled: let torch.compile fuse the passes over the logits.
        targets: a teacher's; the gradient is that of (1 - `targets.weight`) x the first sum + `targets.weight` x the
            second, times the sum of the gradients of both, so the loss must weigh them so.

    Communicates:
        over the tensor group, forward three all-reduces of [n] (maximum; sum of exponentials; logit of the label),
        chunk by chunk; with `targets` one of [2, n] (maxima) and one of [5, n] (sums) besides those of `targets`;
        backward one of [n, h] (f).

    Raises:
        RuntimeError: a second backward pass.

    Source: section 3 (output embedding) for the cut; gradients in the forward pass after Hsu et al. 2024 (Liger).
    """
    hidden = copy_to_tensor_parallel_region(hidden, context)  # f
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, vocab_size, context, compiled, trains, targets)


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
        targets: SoftTargets | None,
    ) -> Tensor:
        num_used = used_columns(vocab_size, len(weight), context)
        wide = wide_type(hidden.dtype)
        total = torch.zeros(() if targets is None else 2, dtype=wide, device=hidden.device)
        chunks = _chunks(len(hidden), len(weight), hidden.is_cuda)
        buffer = torch.empty(chunks[0].stop if chunks else 0, len(weight), dtype=weight.dtype, device=weight.device)
        d_weight = d_bias = None
        if trains:
            d_hidden = torch.empty_like(hidden)
            d_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        for chunk in chunks:
            rows, row_labels = hidden[chunk], labels[chunk]
            logits = _project(rows, weight, bias, buffer)
            logits[:, num_used:] = float("-inf")
            is_scored = row_labels != IGNORE_LABEL
            if targets is None:
                log_total, target, column, elsewhere = _statistics(logits, row_labels, context, compiled)
                total += ((log_total - target) * is_scored).sum()
                if not trains:
                    continue
                # exp(x - inf) is 0: a row that is not scored has no gradient.
                log_total = log_total.masked_fill(~is_scored, float("inf"))
                d_logits = _logits_to_gradient(logits, log_total, target, column, elsewhere, compiled)
            else:
                teacher = targets.logits(chunk, logits, context)
                losses, log_totals, place = _compare(logits, teacher, row_labels, targets, context, compiled)
                total += losses.masked_fill(~is_scored, 0.0).sum(dim=1)
                if not trains:
                    continue
                log_totals = log_totals.masked_fill(~is_scored, float("inf"))
                d_logits = _mixed_gradient(logits, teacher, log_totals, place, targets, compiled)
            torch.mm(d_logits, weight, out=d_hidden[chunk])
            d_weight = _add_product(d_weight, d_logits, rows, len(chunks), compiled)
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
            raise RuntimeError("the backward pass of linear_cross_entropy runs once: it hands its gradients over")
        factor = grad_output.sum()  # of one number, or of two whose weights are in the gradients and add up to 1
        return *(None if d is None else d.mul_(factor) for d in gradients), *[None] * 6


def _chunks(num_rows: int, num_columns: int, on_gpu: bool) -> list[slice]:
    """The rows of each chunk; the first is the longest."""
    at_once = rows_at_once(num_columns, on_gpu)
    return [slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)]


def _project(rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Logits of a chunk, in memory that all chunks share: on a CPU, fresh memory costs as much as the product."""
    out = buffer[: len(rows)]
    return torch.mm(rows, weight.t(), out=out) if bias is None else torch.addmm(bias, rows, weight.t(), out=out)


def _add_product(total: Tensor | None, d_logits: Tensor, rows: Tensor, num_chunks: int, compiled: bool) -> Tensor:
    """Add a chunk's part of the weight's gradient, in fp32 at least if there are several chunks.

    The sum of two is rounded once in either type, so a CPU does without fp32: fresh memory costs it as much as the sum.
    """
    product = d_logits.t() @ rows  # in the weight's type, as any product
    if total is None:
        return product.to(wide_type(product.dtype)) if num_chunks > (1 if product.is_cuda else 2) else product
    return _kernel(_add_in_place, compiled)(total, product)


def _add_in_place(total: Tensor, part: Tensor) -> Tensor:
    return total.add_(part)


def _statistics(
    logits: Tensor, labels: Tensor, context: ParallelContext, compiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row: log of the sum of exponentials, logit of the label, its column here, whether it is elsewhere.

    Shapes:
        logits [n, v/p]; labels int64 [n]; returns four [n], the first two equal on all tensor ranks.
    """
    all_reduce = context.tp_communicator.all_reduce
    own_maximum, own_total = _kernel(_maximum_and_sum, compiled)(logits)
    maximum = all_reduce(own_maximum, "max")
    # A rank that holds only padding has -inf as its maximum and adds nothing.
    own_total = torch.where(own_maximum == float("-inf"), 0.0, own_total * (own_maximum - maximum).exp())
    total = all_reduce(own_total)
    column, elsewhere = context.local_ids(labels, logits.shape[-1])
    own = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(maximum.dtype)
    target = all_reduce(own.masked_fill(elsewhere, 0.0))
    return total.log() + maximum, target, column, elsewhere


def _maximum_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the maximum and the sum of exp(x - maximum), in fp32 at least."""
    maximum = logits.amax(dim=-1).to(wide_type(logits.dtype))
    shifted = logits.to(maximum.dtype, copy=True).sub_(maximum.unsqueeze(-1))
    return maximum, shifted.exp_().sum(dim=-1)


def _logits_to_gradient(
    logits: Tensor, log_total: Tensor, target: Tensor, column: Tensor, elsewhere: Tensor, compiled: bool
) -> Tensor:
    """Softmax minus one-hot labels, in the memory of the logits."""
    gradient = _kernel(_softmax_in_place, compiled)(logits, log_total)
    # The label's own element is set apart, in full precision: it is one number per row, and a scatter inside the pass
    # over all logits would keep the compiler from fusing it.
    rows = torch.arange(len(gradient), device=gradient.device)
    of_label = ((target - log_total).exp() - log_total.isfinite().to(target.dtype)).to(gradient.dtype)
    gradient[rows, column] = torch.where(elsewhere, gradient[rows, column], of_label)
    return gradient


def _softmax_in_place(logits: Tensor, log_total: Tensor) -> Tensor:
    wide = logits.to(log_total.dtype).sub_(log_total.unsqueeze(-1)).exp_()  # the logits themselves if they are wide
    return logits.copy_(wide)


def _compare(
    logits: Tensor, teacher: Tensor, labels: Tensor, targets: SoftTargets, context: ParallelContext, compiled: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """For each row both losses, [2, n]; the logarithms of the normalizers of s, s / T and t / T, [3, n]; the label's
    column here and whether it is elsewhere, [n]."""
    all_reduce, scale = context.tp_communicator.all_reduce, targets.temperature
    column, elsewhere = context.local_ids(labels, logits.shape[-1])
    largest = all_reduce(_kernel(maxima, compiled)(logits, teacher), "max")
    own = _pick(logits, column).to(largest.dtype).masked_fill(elsewhere, 0.0)
    totals = all_reduce(torch.cat([_kernel(sums, compiled)(logits, teacher, largest, scale), own.unsqueeze(0)]))
    logs = totals[:3].log()
    divergence = totals[3] / totals[2] + logs[1] - logs[2]
    log_totals = logs + torch.stack([largest[0], largest[0] / scale, largest[1] / scale])
    return torch.stack([log_totals[0] - totals[4], scale**2 * divergence]), log_totals, (column, elsewhere)


def _mixed_gradient(
    logits: Tensor,
    teacher: Tensor,
    log_totals: Tensor,
    place: tuple[Tensor, Tensor],
    targets: SoftTargets,
    compiled: bool,
) -> Tensor:
    """`mixed_gradient` less (1 - alpha) at the label, in the memory of the logits; the label's element is set apart as
    in `_logits_to_gradient`."""
    (column, elsewhere), scale, weight = place, targets.temperature, targets.weight
    s, t = (_pick(each, column).to(log_totals.dtype) for each in (logits, teacher))
    label, soft, p = (torch.stack([s, s / scale, t / scale]) - log_totals).exp()
    of_label = (1 - weight) * (label - log_totals[0].isfinite().to(s.dtype)) + weight * scale * (soft - p)
    gradient = _kernel(mixed_gradient, compiled)(logits, teacher, log_totals, scale, weight)
    rows = torch.arange(len(gradient), device=gradient.device)
    gradient[rows, column] = torch.where(elsewhere, gradient[rows, column], of_label.to(gradient.dtype))
    return gradient


def _pick(logits: Tensor, column: Tensor) -> Tensor:
    return logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)


@cache
def _kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if compiled else function
