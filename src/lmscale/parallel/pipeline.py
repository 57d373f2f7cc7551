"""Pipeline parallelism: a rank holds a stage of consecutive layers, and only hidden states travel between stages.

A stage computes the micro-batches of a step in the order 1F1B (Narayanan et al. 2019): first as many forward passes as
there are stages after it, then one forward and one backward pass in turn, then the backward passes that are left. Four
stages, eight micro-batches; F2 is the forward pass of micro-batch 2, and a backward pass takes as long as two:

    stage 0 F0 F1 F2 F3                   B0-- F4 B1-- F5 B2-- F6 B3-- F7 B4--    B5--    B6--    B7--
    stage 1    F0 F1 F2             B0-- F3 B1-- F4 B2-- F5 B3-- F6 B4-- F7 B5--    B6--    B7--
    stage 2       F0 F1       B0-- F2 B1-- F3 B2-- F4 B3-- F5 B4-- F6 B5-- F7 B6--    B7--
    stage 3          F0 B0-- F1 B1-- F2 B2-- F3 B3-- F4 B4-- F5 B5-- F6 B6-- F7 B7--

Stage i of p thus keeps the activations of at most p - i micro-batches, and each stage is idle for the time of p - 1
micro-batches: with m of them, a share of (p - 1) / (m + p - 1).

The word embedding is in the first stage, its owner, and as a copy in the last, for the tied output projection. Only the
owner reduces its gradient over the data ranks, counts it in the norm, updates it and saves it; the copy sends its
gradient there and gets the new weight. Nothing else is held twice.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import gather_objects
from .context import ParallelContext


def run_pipeline(
    micro_batches: Sequence[Any],
    forward: Callable[[int, Any, Tensor | None], Tensor],
    backward: Callable[[int, Tensor, Tensor | None], None],
    start_grad_sync: Callable[[], None],
    empty: Callable[[Any], Tensor],
    progress: Callable[[str], None],
    context: ParallelContext,
) -> None:
    """Run this stage's forward and backward passes of a step in the order 1F1B; a single stage runs them in turn.

    Args:
        forward: takes the number of a micro-batch in the step, from 0, the micro-batch, and the hidden states of the
            stage before (None in the first); returns this stage's, or in the last stage the loss.
        backward: takes the number, what `forward` returned, and its gradient from the next stage (None in the last).
        start_grad_sync: called before the last backward pass, in which gradients become final.
        empty: an uninitialized tensor of the shape of a micro-batch's hidden states.
        progress: called with what this stage waits for.

    Communicates:
        with each neighbour one message of the hidden states and one of their gradient per micro-batch; while forward
        and backward passes alternate, the two are one exchange, so that neither side waits to send.
    """
    num, stage = len(micro_batches), context.pp_rank
    warmup = min(context.pp_size - 1 - stage, num)
    pending: deque[tuple[Tensor | None, Tensor]] = deque()  # of the forward passes whose backward pass is to come

    def compute(index: int, received: Tensor | None) -> Tensor:
        output = forward(index, micro_batches[index], received)
        pending.append((received, output))
        return output

    def differentiate(index: int, gradient: Tensor | None) -> Tensor | None:
        received, output = pending.popleft()
        if index == num - 1:
            start_grad_sync()
        backward(index, output, gradient)
        return None if received is None else received.grad

    def with_previous(gradient: Tensor | None, index: int) -> Tensor | None:
        """Send a gradient, if there is one, and receive the hidden states of micro-batch `index`, if it exists."""
        if context.is_first_stage:
            return None
        progress(f"exchange with stage {stage - 1} before micro-batch {index + 1}")
        received = empty(micro_batches[index]) if index < num else None
        exchange(stage - 1, gradient, received, context)
        return None if received is None else received.requires_grad_()

    def with_next(output: Tensor | None, index: int) -> Tensor | None:
        """Send hidden states, if there are some, and receive the gradient of micro-batch `index`, if it exists."""
        if context.is_last_stage:
            return None
        progress(f"exchange with stage {stage + 1} before the gradient of micro-batch {index + 1}")
        received = empty(micro_batches[index]) if index >= 0 else None
        exchange(stage + 1, None if output is None else output.detach(), received, context)
        return received

    for index in range(warmup):
        with_next(compute(index, with_previous(None, index)), -1)
    received = with_previous(None, warmup) if warmup < num else None
    for index in range(warmup, num):
        gradient = with_next(compute(index, received), index - warmup)
        received = with_previous(differentiate(index - warmup, gradient), index + 1)
    for index in range(num - warmup, num):
        with_previous(differentiate(index, with_next(None, index)), num)


def run_forward(
    micro_batch: Any,
    forward: Callable[[Any, Tensor | None], Tensor],
    empty: Callable[[Any], Tensor],
    context: ParallelContext,
) -> Tensor:
    """Run this stage's forward pass of one micro-batch; returns its hidden states, or in the last stage the result.

    Called for one micro-batch after the other, the stages compute different ones at the same time.

    Communicates:
        one message of the hidden states from the stage before and one to the next.
    """
    received = None
    if not context.is_first_stage:
        received = empty(micro_batch)
        exchange(context.pp_rank - 1, None, received, context)
    output = forward(micro_batch, received)
    if not context.is_last_stage:
        exchange(context.pp_rank + 1, output.detach(), None, context)
    return output


def exchange(stage: int, sent: Tensor | None, received: Tensor | None, context: ParallelContext) -> None:
    """Send a tensor to another stage of this pipeline and receive one from it, at the same time; None: does not.

    Both in one call: two stages that each wait to send before they receive would wait forever.
    """
    both = (dist.isend, None if sent is None else sent.contiguous()), (dist.irecv, received)
    operations = [
        dist.P2POp(operation, tensor, group=context.pp_group, group_peer=stage)
        for operation, tensor in both
        if tensor is not None
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def sum_over_stages(x: Tensor, context: ParallelContext) -> Tensor:
    """Add `x` in place over the stages of this pipeline; returns `x`."""
    if context.pp_size > 1:
        dist.all_reduce(x, group=context.pp_group)
    return x


def gather_from_stages(item: Any, context: ParallelContext) -> list[Any]:
    """The small item of each stage of this pipeline, on all its ranks."""
    return [item] if context.pp_size == 1 else gather_objects(item, context.pp_group)


def add_to_owner(gradient: Tensor, context: ParallelContext) -> None:
    """Add the gradient of the copy of a tied weight, in the last stage, to that of its owner, in the first.

    Communicates:
        one message of the gradient from the last stage to the first.
    """
    if context.is_last_stage:
        exchange(0, gradient, None, context)
    else:
        of_copy = torch.empty_like(gradient)
        exchange(context.pp_size - 1, None, of_copy, context)
        gradient.add_(of_copy)


def copy_from_owner(weight: Tensor, context: ParallelContext) -> None:
    """Overwrite the copy of a tied weight, in the last stage, by its owner's, in the first.

    Communicates:
        one message of the weight from the first stage to the last.
    """
    if context.is_last_stage:
        exchange(0, None, weight, context)
    else:
        exchange(context.pp_size - 1, weight, None, context)
