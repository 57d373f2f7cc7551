"""Loss of given tokens under a GPT, computed only at selected positions.

Legend: b rows, s tokens, h hidden, v padded vocabulary, p tensor-parallel size.
"""

import torch
from torch import Tensor

from ..models import GPT
from ..parallel import vocab_parallel_cross_entropy
from ..parallel.argmax import vocab_parallel_argmax

PLACES_AT_ONCE = 1024  # positions whose logits are in memory at once: 0.2 GB in fp32 at 51,200 columns


@torch.inference_mode()
def score_places(
    model: GPT, tokens: Tensor, rows: Tensor, columns: Tensor, targets: Tensor, banned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of given next tokens, and the most probable next tokens, at selected positions of a batch.

    The projection to the vocabulary, most of the work of a small model, is computed for these positions only. Rows may
    be padded on the right with any ids, since attention is causal.

    Shapes:
        tokens int64 [b, s]; rows, columns, targets int64 [n]: the target follows `tokens[row, column]`; banned int64
        [k];
        returns losses in nats fp64 [n], the most probable ids int64 [n], and the most probable ids that are not banned
        int64 [n], all equal on all tensor ranks.

    Communicates:
        over the tensor group, the model's forward pass, three all-reduces of [n] for the losses and two for the ids
        (twice if ids are banned).
    """
    hidden = model.transformer(tokens)[rows, columns]  # [n, h]
    losses, best, allowed = [], [], []
    padded = model.config.padded_vocab_size
    for part, wanted in zip(hidden.split(PLACES_AT_ONCE), targets.split(PLACES_AT_ONCE), strict=True):
        logits = model.logits(part)  # [n, v/p]
        losses.append(vocab_parallel_cross_entropy(logits, wanted, padded, model.context).double())
        best.append(vocab_parallel_argmax(logits, model.context))
        if banned is not None:
            local = banned - model.context.tp_rank * logits.shape[-1]
            logits[:, local[(local >= 0) & (local < logits.shape[-1])]] = float("-inf")
            allowed.append(vocab_parallel_argmax(logits, model.context))
    return torch.cat(losses), torch.cat(best), torch.cat(allowed or best)
