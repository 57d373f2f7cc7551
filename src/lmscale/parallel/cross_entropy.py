"""Cross-entropy over a vocabulary that no rank holds whole."""

import torch
from torch import Tensor

from .collectives import max_over_tensor_ranks, sum_over_tensor_ranks
from .context import ParallelContext

IGNORE_LABEL = -100  # the label of a position that is not scored, as in torch and transformers


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, context: ParallelContext) -> Tensor:
        # fp16 and bf16 lose the sum of 51,200 exponentials; fp32 and fp64 are used as they come.
        scores = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        maximum = max_over_tensor_ranks(scores.amax(dim=-1), context)  # [...]
        exponentials = (scores - maximum.unsqueeze(-1)).exp_()  # [..., v/p]
        total = sum_over_tensor_ranks(exponentials.sum(dim=-1), context)  # [...]

        columns = logits.shape[-1]
        local = labels - context.tp_rank * columns
        is_local = (local >= 0) & (local < columns)
        index = local.masked_fill(~is_local, 0).unsqueeze(-1)  # [..., 1]
        target = scores.gather(-1, index).squeeze(-1).masked_fill(~is_local, 0.0)
        target = sum_over_tensor_ranks(target, context)  # [...]

        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, is_local)
        ctx.dtype = logits.dtype
        return total.log() + maximum - target

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        softmax, index, is_local = ctx.saved_tensors
        grad = softmax * grad_output.unsqueeze(-1)
        # One target a position, so plain scatter is enough, and unlike scatter_add it is deterministic everywhere.
        target = grad.gather(-1, index) - (grad_output * is_local).unsqueeze(-1)
        grad.scatter_(-1, index, target)
        return grad.to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, context: ParallelContext) -> Tensor:
    """Loss of each position in nats, from logits cut over the vocabulary.

    Shapes:
        logits [b, s, v/p], this rank's columns; labels int64 [b, s], ids of the whole vocabulary or -100;
        returns [b, s] (fp32 for half logits, else their dtype), zero where the label is -100.

    Communicates:
        forward three all-reduces of [b, s] over the tensor group (maximum; sum of exponentials; score of the target),
        b x s numbers instead of the b x s x v of gathered logits; backward nothing.

    Source: section 3 (output embedding).
    """
    losses = _VocabParallelCrossEntropy.apply(logits, labels, context)
    return losses.masked_fill(labels == IGNORE_LABEL, 0.0)
