"""The order in which the forward and backward passes of a step's micro-batches run."""

from collections.abc import Callable, Sequence
from typing import Any


def run_micro_batches(
    micro_batches: Sequence[Any],
    forward: Callable[[int, Any], Any],
    backward: Callable[[int, Any], None],
    start_grad_sync: Callable[[], None],
) -> None:
    """Run the forward and the backward pass of one micro-batch after the other.

    Args:
        forward: takes the number of a micro-batch in the step, from 0, and the micro-batch; returns its loss.
        backward: takes the number and the loss.
        start_grad_sync: called before the last backward pass, in which gradients become final.
    """
    for index, micro_batch in enumerate(micro_batches):
        loss = forward(index, micro_batch)
        if index == len(micro_batches) - 1:
            start_grad_sync()
        backward(index, loss)
