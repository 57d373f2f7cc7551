"""Word-level perplexity of a text under a GPT that reads subwords.

Source: section 5.2 and appendix E.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..models import GPT
from ..parallel.data_collectives import sum_over_data_ranks
from .scoring import score_places
from .windows import Windows


def perplexity(loss_sum: float, count: int) -> float:
    """exp(loss / count); infinite if that is too large for a number, or if nothing is counted.

    Args:
        loss_sum: total loss of a text, in nats.
        count: T_o, the words of the raw text, in the formula of appendix E; T_o - 1 in Megatron-LM's code (which also
            caps the exponent at 20); or T, the predicted subwords, which depends on the tokenizer.
    """
    try:
        return math.exp(loss_sum / count) if count > 0 else math.inf
    except OverflowError:
        return math.inf


def measure_losses(
    model: GPT,
    tokens: Sequence[int],
    windows: Windows,
    micro_batch_tokens: int,
    on_batch: Callable[[int], None] = lambda number: None,
) -> Tensor:
    """Compute the loss of each window's scored targets, in nats.

    Batches are the same at every layout and each is processed by one data rank, so results do not depend on `dp_size`.

    Args:
        tokens: the whole stream, T + 1 ids.
        micro_batch_tokens: maximum number of tokens per forward pass, unless one window has more.
        on_batch: called with the number of windows of each finished batch of this rank.

    Shapes:
        returns fp64 [number of windows], equal on all ranks.

    Raises:
        ValueError: a loss is not a number.

    Communicates:
        over the tensor group, see `score_places`; over the data group one all-reduce of all losses.
    """
    context, device = model.context, model.transformer.position_embedding.device
    stream = torch.as_tensor(tokens, dtype=torch.int64)
    losses = torch.zeros(len(windows), dtype=torch.float64, device=device)
    batches = _batches(windows, max(1, micro_batch_tokens // windows.window))
    for batch in batches[context.dp_rank :: context.dp_size]:
        _, num_read, num_scored = windows[batch[0]]
        starts = torch.tensor([windows[index][0] for index in batch])
        inputs = stream[starts[:, None] + torch.arange(num_read)]  # [b, s]
        columns = torch.arange(num_read - num_scored, num_read)
        targets = stream[starts[:, None] + columns + 1]  # [b, scored]
        rows = torch.arange(len(batch)).repeat_interleave(num_scored)
        places = (inputs, rows, columns.repeat(len(batch)), targets.flatten())
        found, _, _ = score_places(model, *(part.to(device) for part in places))
        losses[batch[0] : batch[-1] + 1] = found.view(len(batch), num_scored).sum(dim=-1)
        on_batch(len(batch))
    sum_over_data_ranks(losses, context)
    if bool(losses.isnan().any()):
        window = int(losses.isnan().int().argmax())
        raise ValueError(f"the loss of every window must be a number, but that of window {window} is nan")
    return losses


def _batches(windows: Windows, size: int) -> list[list[int]]:
    """Group consecutive windows of equal shape, at most `size` each; only first and last windows differ in shape."""
    batches = []
    for _, group in groupby(range(len(windows)), key=lambda index: windows[index][1:]):
        indices = list(group)
        batches += [indices[start : start + size] for start in range(0, len(indices), size)]
    return batches
