"""How probable a GPT finds given tokens, asked only at the places that count.

Legend: b rows, s tokens, h hidden, v padded vocabulary, p tensor-parallel size.
"""

import torch
from torch import Tensor

from ..models import GPT
from ..parallel import vocab_parallel_cross_entropy, vocab_parallel_logits
from ..parallel.argmax import vocab_parallel_argmax

PLACES_AT_ONCE = 1024  # whose logits are in memory together: 0.2 GB in fp32 at 51,200 columns


@torch.inference_mode()
def score_places(
    model: GPT, tokens: Tensor, rows: Tensor, columns: Tensor, targets: Tensor, banned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of given next tokens, and the most probable next token, at chosen places of a batch.

    The projection to the vocabulary, most of the work of a small model, is done for these places alone. Rows may be
    filled up on the right with any ids: what stands behind a place does not change it.

    Shapes:
        tokens int64 [b, s]; rows, columns, targets int64 [n]: the place is `tokens[row, column]`, the target what is
        thought to follow it; banned int64 [k];
        returns losses in nats fp64 [n], the most probable ids int64 [n], and the most probable that are not banned
        int64 [n], all equal on all tensor ranks.

    Communicates:
        over the tensor group, the model's forward pass, three all-reduces of [n] for the losses and two for each of
        the ids (with nothing banned, for one of them).
    """
    hidden = model.transformer(tokens)[rows, columns]  # [n, h]
    losses, best, allowed = [], [], []
    for part, wanted in zip(hidden.split(PLACES_AT_ONCE), targets.split(PLACES_AT_ONCE), strict=True):
        weight = model.transformer.word_embedding.weight
        logits = vocab_parallel_logits(part, weight, None, model.config.vocab_size, model.context)  # [n, v/p]
        losses.append(vocab_parallel_cross_entropy(logits, wanted, model.context).double())
        best.append(vocab_parallel_argmax(logits, model.context))
        if banned is not None:
            local = banned - model.context.tp_rank * logits.shape[-1]
            logits[:, local[(local >= 0) & (local < logits.shape[-1])]] = float("-inf")
            allowed.append(vocab_parallel_argmax(logits, model.context))
    return torch.cat(losses), torch.cat(best), torch.cat(allowed or best)
