"""Interface of a contender: a model, AdamW and one training step on a given batch; and the batches, shared by all.

All clip the gradient norm at 1 and run the full step: forward pass, backward pass, update. Ours and Hugging Face's
start from the same weights; a model file and megatron-core initialize their own. Peers with fp32 weights that compute
in bf16 use autocast, as their users would.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from analysis.benchmarks.config import BenchConfig
from lmscale.config import TransformerConfig
from lmscale.models import scored_positions
from lmscale.parallel import IGNORE_LABEL

Batch = dict[str, Tensor]
MAX_NORM = 1.0


class Contender(ABC):
    """A training loop that runs one step per call."""

    attention: str | None = None  # ours: `model.attention`, or what `auto` selected

    @abstractmethod
    def step(self, batches: list[Batch], number: int) -> float | Tensor:
        """Train on the micro-batches of a step: a forward and backward pass of each, then one update.

        Returns:
            the mean of their mean losses before the update (BERT: masked words plus sentence order).
        """


def make_batches(config: TransformerConfig, bench: BenchConfig, count: int, device: torch.device) -> list[list[Batch]]:
    """Draw the micro-batches of `count` steps: token ids from a Zipf distribution, so that the loss can decrease.

    GPT: `tokens`, `labels` (the next tokens) and `unshifted` [b, s]. BERT: 15 % of the labels, `token_types`, a mask of
    ones, `sop_labels`, and `scored`.
    """
    generator = torch.Generator().manual_seed(bench.seed)
    weights = 1.0 / torch.arange(1, config.vocab_size + 1, dtype=torch.float64)
    weights[0] = 0.0  # transformers' BERT treats it as padding, without gradient
    shape = (bench.micro_batch_size, bench.length)
    found: list[dict[str, Any]] = []
    per_step = bench.step_sequences // bench.micro_batch_size
    for _ in range(count * per_step):
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
    moved = [{key: value.contiguous().to(device) for key, value in batch.items()} for batch in found]
    return [moved[first : first + per_step] for first in range(0, len(moved), per_step)]
