"""LAMBADA: predict the last word of a passage from the text before it.

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
    """The model's result on one passage.

    Args:
        line: line number of the passage.
        log_likelihood: log-likelihood of the whole word given the text before it, in nats (at most 0).
        right: every token of the word is the most probable one given its predecessors.
        last_token_right: the last token of the word is.
        right_filtered: as `right`, with stop words excluded as the first token.
    """

    line: int
    log_likelihood: float
    right: bool
    last_token_right: bool
    right_filtered: bool


def predict_last_words(
    model: GPT,
    passages: Sequence[Passage],
    micro_batch_tokens: int,
    banned: Sequence[int] = (),
    on_batch: Callable[[int], None] = lambda number: None,
) -> list[Answer]:
    """Predict the last word of every passage.

    Passages of similar length form a batch, padded to the longest. Batches are the same at every layout.

    Args:
        micro_batch_tokens: maximum number of tokens per forward pass, unless one passage has more.
        banned: ids excluded as first token in `right_filtered`.
        on_batch: called with the number of passages of each finished batch of this rank.

    Returns:
        answers in the order of the passages, equal on all ranks.

    Raises:
        ValueError: a likelihood is not a number.

    Communicates:
        over the tensor group, see `score_places`; over the data group one all-reduce of five numbers per passage.

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
        on_batch(len(batch))
    sum_over_data_ranks(table, context)
    assert bool((table[:, 0] == 1).all())  # every passage exactly once
    if bool(table.isnan().any()):
        line = passages[int(table.isnan().any(dim=-1).int().argmax())].line
        raise ValueError(f"the likelihood of every word must be a number, but that of line {line} is nan")
    return [
        Answer(passage.line, -loss, wrong == 0, last_wrong == 0, filtered_wrong == 0)
        for passage, (_, loss, wrong, last_wrong, filtered_wrong) in zip(passages, table.tolist(), strict=True)
    ]


def _batches(passages: Sequence[Passage], micro_batch_tokens: int) -> list[list[int]]:
    """Group indices of passages of similar length, longest first, with at most that many tokens when padded."""
    lengths = [len(passage.context) + len(passage.word) - 1 for passage in passages]
    batches: list[list[int]] = []
    for index in sorted(range(len(passages)), key=lambda index: -lengths[index]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or longest * (len(batches[-1]) + 1) > micro_batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def _places(passages: Sequence[Passage]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the input tokens [b, s], and row, column and target [n] of every token of the words."""
    reads = [(*passage.context, *passage.word[:-1]) for passage in passages]
    tokens = torch.zeros(len(reads), max(map(len, reads)), dtype=torch.int64)
    rows, columns, targets = [], [], []
    for row, (read, passage) in enumerate(zip(reads, passages, strict=True)):
        tokens[row, : len(read)] = torch.tensor(read)
        rows += [row] * len(passage.word)
        columns += range(len(passage.context) - 1, len(read))
        targets += passage.word
    return tokens, torch.tensor(rows), torch.tensor(columns), torch.tensor(targets)
