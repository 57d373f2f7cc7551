"""LAMBADA: the last word of a passage, predicted from the passage before it.

Legend: b passages, s tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..models import GPT
from ..parallel.data_collectives import sum_over_data_ranks
from .lambada import Passage
from .scoring import score_places


@dataclass(frozen=True)
class Answer:
    """What the model made of one item.

    Args:
        log_likelihood: of the whole word after the passage, in nats (at most 0).
        right: every token of the word is the most probable one, given those before it.
        last_token_right: its last one is.
        right_filtered: as `right`, but the first token is never a stop word.
    """

    line: int
    log_likelihood: float
    right: bool
    last_token_right: bool
    right_filtered: bool


def answer_passages(
    model: GPT,
    passages: Sequence[Passage],
    micro_batch_tokens: int,
    banned: Sequence[int] = (),
    hear: Callable[[int], None] = lambda number: None,
) -> list[Answer]:
    """Ask the model for the last word of every passage, once each.

    Passages of like length are read together, filled up to the longest of them. Batches are the same at every layout.

    Args:
        micro_batch_tokens: of a forward pass, at most, unless one passage has more.
        banned: ids that `right_filtered` never takes as a first token.
        hear: called with the number of passages each batch of this rank has done.

    Returns:
        the answers in the order of the passages, equal on all ranks.

    Raises:
        ValueError: a likelihood that is not a number.

    Communicates:
        over the tensor group, see `score_places`; over the data group one all-reduce of five numbers a passage.

    Source: section 5.2; "strict" in NVIDIA/Megatron-LM v1.0's `--strict-lambada` is `right`.
    """
    context, device = model.context, model.transformer.position_embedding.device
    forbidden = torch.tensor(banned, dtype=torch.int64, device=device) if banned else None
    table = torch.zeros(len(passages), 5, dtype=torch.float64, device=device)
    batches = _batches(passages, micro_batch_tokens)
    for batch in batches[context.dp_rank :: context.dp_size]:
        chosen = [passages[index] for index in batch]
        places = _places(chosen)
        rows, targets = places[1].to(device), places[3].to(device)
        losses, best, allowed = score_places(model, *(part.to(device) for part in places), banned=forbidden)
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        is_last = is_first.roll(-1)
        wrong = best != targets
        wrong_filtered = torch.where(is_first, allowed, best) != targets
        numbers = torch.stack((losses, wrong.double(), (wrong & is_last).double(), wrong_filtered.double()), dim=-1)
        sums = torch.zeros(len(batch), 4, dtype=torch.float64, device=device).index_add_(0, rows, numbers)
        table[batch] = torch.cat((torch.ones_like(sums[:, :1]), sums), dim=-1)
        hear(len(batch))
    sum_over_data_ranks(table, context)
    assert bool((table[:, 0] == 1).all())  # each passage once
    if bool(table.isnan().any()):
        line = passages[int(table.isnan().any(dim=-1).int().argmax())].line
        raise ValueError(f"the likelihood of every word must be a number, but that of line {line} is nan")
    return [
        Answer(passage.line, -loss, wrong == 0, last_wrong == 0, filtered_wrong == 0)
        for passage, (_, loss, wrong, last_wrong, filtered_wrong) in zip(passages, table.tolist(), strict=True)
    ]


def _batches(passages: Sequence[Passage], micro_batch_tokens: int) -> list[list[int]]:
    """Numbers of passages of like length, longest first, whose filled-up rows have that many tokens at most."""
    lengths = [len(passage.context) + len(passage.word) - 1 for passage in passages]
    batches: list[list[int]] = []
    for index in sorted(range(len(passages)), key=lambda index: -lengths[index]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or longest * (len(batches[-1]) + 1) > micro_batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def _places(passages: Sequence[Passage]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [b, s] to read, and row, column and target [n] of every token of the words."""
    reads = [(*passage.context, *passage.word[:-1]) for passage in passages]
    tokens = torch.zeros(len(reads), max(map(len, reads)), dtype=torch.int64)
    rows, columns, targets = [], [], []
    for row, (read, passage) in enumerate(zip(reads, passages, strict=True)):
        tokens[row, : len(read)] = torch.tensor(read)
        rows += [row] * len(passage.word)
        columns += range(len(passage.context) - 1, len(read))
        targets += passage.word
    return tokens, torch.tensor(rows), torch.tensor(columns), torch.tensor(targets)
