"""What a teacher adds to the chunked loss: T^2 KL(teacher || student), over a vocabulary cut over the tensor ranks.

Legend: s logits of the student, t of the teacher, T temperature, q_T = softmax(s / T), p = softmax(t / T), n rows.

Source: Hinton et al. 2015.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..partition import rows_at_once
from .context import ParallelContext

_NEVER = float("-inf")


@dataclass
class SoftTargets(ABC):
    """The teacher's distribution for every row of the loss.

    Args:
        temperature: T, above 0.
        weight: alpha: the loss is (1 - alpha) x the labels' + alpha x T^2 KL.
    """

    temperature: float
    weight: float

    @abstractmethod
    def logits(self, rows: slice, student: Tensor, context: ParallelContext) -> Tensor:
        """The teacher's logits of some rows, -inf for what it never predicts; the caller may overwrite them.

        Shapes:
            student [n, v/p], this rank's columns of the student's logits; returns [n, v/p].
        """


@dataclass
class ProjectedTargets(SoftTargets):
    """The distribution of a teacher that runs beside the student.

    Shapes:
        rows [n, h]; word_embedding [v/p, h]; bias [v/p] or None, with the padded vocabulary v of the student.

    Args:
        vocab_size: ids that the teacher predicts.
    """

    rows: Tensor
    word_embedding: Tensor
    bias: Tensor | None
    vocab_size: int
    _buffer: Tensor | None = None

    def logits(self, rows: slice, student: Tensor, context: ParallelContext) -> Tensor:
        """See `SoftTargets`; communicates nothing."""
        if self._buffer is None:  # the first chunk is the longest
            self._buffer = torch.empty_like(student)
        own, weight, out = self.rows[rows], self.word_embedding.t(), self._buffer[: len(student)]
        torch.mm(own, weight, out=out) if self.bias is None else torch.addmm(self.bias, own, weight, out=out)
        out[:, used_columns(self.vocab_size, out.shape[1], context) :] = _NEVER
        return out

    def most_probable(self, top_k: int, context: ParallelContext) -> tuple[Tensor, Tensor]:
        """`top_k_log_probabilities` of all rows, as many at a time as the loss projects."""
        at_once = rows_at_once(len(self.word_embedding), self.rows.is_cuda)
        like = self.rows.new_empty(()).expand(len(self.rows), len(self.word_embedding))  # has the shape alone
        chunks = [slice(start, start + at_once) for start in range(0, max(len(like), 1), at_once)]
        logits = (self.logits(chunk, like[chunk], context) for chunk in chunks)
        found = [top_k_log_probabilities(each, top_k, self.temperature, context) for each in logits]
        log_p, ids = map(torch.cat, zip(*found, strict=True))
        return log_p, ids


@dataclass
class CachedTargets(SoftTargets):
    """The distribution of the k most probable ids, with all others as one bucket: their probabilities are in the
    proportions that the student gives them, which is the smallest divergence.

    So the divergence is one of distributions, never negative, and its gradient is T (q_T - p) as for a whole teacher.

    Shapes:
        log_p [n, k + 1], log-probabilities at T of the ids, and of all others together (-inf if there are none); ids
        int64 [n, k].
    """

    log_p: Tensor
    ids: Tensor
    _buffer: Tensor | None = None

    def logits(self, rows: slice, student: Tensor, context: ParallelContext) -> Tensor:
        """See `SoftTargets`.

        Communicates:
            over the tensor group two all-reduces of [n]: maximum and sum of the student's other columns. Subtracting
            the probabilities of the ids from 1 would leave nothing of what a confident student gives the others.
        """
        wide, width = wide_type(student.dtype), student.shape[1]
        log_p, scale = self.log_p[rows].to(wide), self.temperature
        if self._buffer is None:
            self._buffer = torch.empty(len(student), width + 1, dtype=wide, device=student.device)
        column, elsewhere = context.local_ids(self.ids[rows], width)
        column = column.masked_fill(elsewhere, width)  # a column that is cut off: no id is picked on the host
        whole = self._buffer[: len(student)]
        out = whole[:, :width]
        out.copy_(student)
        whole.scatter_(1, column, _NEVER)
        maximum = context.tp_communicator.all_reduce(out.amax(dim=-1), "max")
        maximum = maximum.masked_fill(maximum == _NEVER, 0.0)
        total = context.tp_communicator.all_reduce(out.sub(maximum.unsqueeze(-1)).div_(scale).exp_().sum(dim=-1))
        others, log_total = log_p[:, -1], total.log() + maximum / scale
        shift = (scale * (others - log_total)).masked_fill(log_total == _NEVER, _NEVER)
        out.add_(shift.unsqueeze(-1))
        whole.scatter_(1, column, scale * log_p[:, :-1])
        return out


def top_k_log_probabilities(
    logits: Tensor, top_k: int, temperature: float, context: ParallelContext
) -> tuple[Tensor, Tensor]:
    """The k most probable ids of softmax(t / T), and the log-probabilities of each and of all others together.

    The others are summed over their own columns: 1 less the probabilities of the ids would round to 0.

    Shapes:
        logits [n, v/p], this rank's columns, -inf for what is never predicted; returns wide [n, k + 1], as of
        `CachedTargets`, and int64 [n, k], most probable first, equal on all tensor ranks.

    Args:
        top_k: k, at most the ids that are predicted.

    Communicates:
        over the tensor group three all-gathers: of the min(k, v/p) most probable ids of each rank and their logits, and
        of [n].
    """
    own = logits.to(wide_type(logits.dtype), copy=True).div_(temperature)

    def gather(x: Tensor) -> Tensor:
        return torch.cat(context.tp_communicator.all_gather(x).chunk(context.tp_size), dim=1)

    values, columns = own.topk(min(top_k, own.shape[1]))
    candidates = gather(columns + context.tp_rank * own.shape[1])
    values, places = gather(values).topk(top_k)
    ids = candidates.gather(1, places)
    column, elsewhere = context.local_ids(ids, own.shape[1])
    own.scatter_reduce_(1, column, torch.full_like(values, _NEVER).masked_fill_(elsewhere, -_NEVER), "amin")
    others = gather(own.logsumexp(1, keepdim=True)).logsumexp(1, keepdim=True)
    return torch.cat([values, others], dim=1).log_softmax(1), ids


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half types, which lose the sum of 51,200 exponentials; fp32 and fp64 stay."""
    return torch.promote_types(dtype, torch.float32)


def used_columns(vocab_size: int, width: int, context: ParallelContext) -> int:
    """How many of this rank's `width` columns are ids; the others are padding."""
    return min(max(vocab_size - context.tp_rank * width, 0), width)


def maxima(student: Tensor, teacher: Tensor) -> Tensor:
    """The largest logit of each row, wide [2, n]."""
    return torch.stack([logits.amax(dim=-1).to(wide_type(student.dtype)) for logits in (student, teacher)])


def sums(student: Tensor, teacher: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """This rank's part of three normalizers and of the divergence, wide [4, n]: those of q_1, q_T and p, and the sum of
    e^t' (t' - s'), with s' = (s - max s) / T and t' alike.
    """
    s = student.to(largest.dtype, copy=True).sub_(largest[0].unsqueeze(-1))
    of_student = of_labels = s.exp().sum(dim=-1)
    if temperature != 1.0:
        s = s.div_(temperature)
        of_student = s.exp().sum(dim=-1)
    t = teacher.to(largest.dtype, copy=True).sub_(largest[1].unsqueeze(-1))
    t = t if temperature == 1.0 else t.div_(temperature)
    difference = s.neg_().add_(t)
    p = t.exp_()
    # Where p is 0 the difference may be infinite, or not a number in the padding.
    difference = difference.mul_(p).masked_fill_(p == 0, 0.0)
    return torch.stack([of_labels, of_student, p.sum(dim=-1), difference.sum(dim=-1)])


def mixed_gradient(student: Tensor, teacher: Tensor, log_totals: Tensor, temperature: float, weight: float) -> Tensor:
    """(1 - alpha) q_1 + alpha T (q_T - p), in the memory of the student's logits.

    Shapes:
        log_totals wide [3, n], the logarithms of the normalizers of s, s / T and t / T; inf where a row is not scored.
    """
    of_labels, of_student, of_teacher = log_totals.unsqueeze(-1)
    wide = log_totals.dtype
    if temperature == 1.0:
        p = teacher.to(wide).sub_(of_teacher).exp_()
        return student.copy_(student.to(wide).sub_(of_labels).exp_().sub_(p, alpha=weight))
    soft = student.to(wide, copy=True).div_(temperature).sub_(of_student).exp_()
    soft.sub_(teacher.to(wide).div_(temperature).sub_(of_teacher).exp_())
    mixed = student.to(wide).sub_(of_labels).exp_().mul_(1 - weight).add_(soft, alpha=weight * temperature)
    return student.copy_(mixed)
