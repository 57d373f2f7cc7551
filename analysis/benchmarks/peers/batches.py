"""Batches shared by all contenders."""

from typing import Any

import torch

from analysis.benchmarks.config import BenchConfig
from lmscale.config import TransformerConfig
from lmscale.models import scored_positions
from lmscale.parallel import IGNORE_LABEL

from .contender import Batch


def make_batches(config: TransformerConfig, bench: BenchConfig, count: int, device: torch.device) -> list[Batch]:
    """Draw batches of token ids from a Zipf distribution, so that the loss can decrease.

    GPT: `tokens`, `labels` (the next tokens) and `unshifted` [b, s]. BERT: 15 % of the labels, `token_types`, a mask of
    ones, `sop_labels`, and `scored`.
    """
    generator = torch.Generator().manual_seed(bench.seed)
    weights = 1.0 / torch.arange(1, config.vocab_size + 1, dtype=torch.float64)
    weights[0] = 0.0  # transformers' BERT treats it as padding, without gradient
    shape = (bench.micro_batch_size, bench.length)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        drawn = torch.multinomial(weights, shape[0] * (shape[1] + 1), replacement=True, generator=generator)
        drawn = drawn.view(shape[0], shape[1] + 1)
        if config.family == "gpt":
            # transformers' loss ignores the last position of a sequence, which has no next token.
            labels = drawn[:, 1:].clone()
            labels[:, -1] = IGNORE_LABEL
            found.append({"tokens": drawn[:, :-1], "labels": labels, "unshifted": drawn[:, :-1]})
            continue
        masked = torch.rand(shape, generator=generator) < 0.15
        masked[:, 0] = True  # every sequence has a masked position
        batch = {"tokens": drawn[:, 1:], "labels": drawn[:, 1:].masked_fill(~masked, IGNORE_LABEL)}
        batch["token_types"] = (torch.arange(shape[1]) >= shape[1] // 2).long().expand(shape)
        batch["sop_labels"] = torch.randint(0, 2, shape[:1], generator=generator)
        batch["scored"] = scored_positions(batch["labels"])
        found.append(batch)
    return [{key: value.contiguous().to(device) for key, value in batch.items()} for batch in found]
