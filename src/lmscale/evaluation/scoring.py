"""Loss of given tokens under a language model, computed only at selected positions.

Legend: b rows, s tokens, h hidden, v padded vocabulary, p tensor-parallel size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.language_model import LanguageModel
from ..parallel import vocab_parallel_cross_entropy
from ..parallel.argmax import vocab_parallel_argmax

PLACES_AT_ONCE = 1024  # positions whose logits are in memory at once: 0.2 GB in fp32 at 51,200 columns


def last_places(items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay out rows whose last positions are scored.

    Args:
        items: of each row, the tokens to read, and the targets of as many last ones of them.

    Shapes:
        returns tokens int64 [b, s], padded on the right; rows, columns, targets int64 [n].
    """
    tokens = torch.zeros(len(items), max(len(read) for read, _ in items), dtype=torch.int64)
    rows, columns, targets = [], [], []
    for row, (read, wanted) in enumerate(items):
        tokens[row, : len(read)] = torch.tensor(read)
        rows += [row] * len(wanted)
        columns += range(len(read) - len(wanted), len(read))
        targets += wanted
    return tokens, torch.tensor(rows), torch.tensor(columns), torch.tensor(targets)


@torch.inference_mode()
def score_places(
    model: LanguageModel, tokens: Tensor, rows: Tensor, columns: Tensor, targets: Tensor, banned: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of given tokens, and the most probable tokens, at selected positions of a batch.

    A GPT predicts the next token, a BERT the masked one. The projection to the vocabulary, most of the work of a small
    model, is computed for these positions only. A GPT's rows may be padded on the right with any ids, since attention
    is causal; a BERT's must have equal lengths.

    Shapes:
        tokens int64 [b, s]; rows, columns, targets int64 [n], on any device: the target is predicted where
        `tokens[row, column]` is read; returns losses in nats fp64 [n], the most probable ids int64 [n], and the most
        probable ids that are not banned int64 [n], on the model's device and equal on all tensor ranks.

    Communicates:
        over the tensor group, the model's forward pass, three all-reduces of [n] for the losses and two for the ids
        (twice if ids are banned).
    """
    device = model.transformer.position_embedding.device
    tokens, rows, columns, targets = (part.to(device) for part in (tokens, rows, columns, targets))
    forbidden = torch.tensor(banned, dtype=torch.int64, device=device)
    token_types = torch.zeros_like(tokens) if model.config.traits.num_token_types else None
    hidden = model.transformer(tokens, token_types)[rows, columns]  # [n, h]
    losses, best, allowed = [], [], []
    padded = model.config.padded_vocab_size
    for part, wanted in zip(hidden.split(PLACES_AT_ONCE), targets.split(PLACES_AT_ONCE), strict=True):
        logits = model.logits(part)  # [n, v/p]
        losses.append(vocab_parallel_cross_entropy(logits, wanted, padded, model.context).double())
        best.append(vocab_parallel_argmax(logits, model.context))
        if banned:
            local = forbidden - model.context.tp_rank * logits.shape[-1]
            logits[:, local[(local >= 0) & (local < logits.shape[-1])]] = float("-inf")
            allowed.append(vocab_parallel_argmax(logits, model.context))
    return torch.cat(losses), torch.cat(best), torch.cat(allowed or best)
