"""Divide items into steps and ranks and build their tensors; no item is dropped and padding is small."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.permutation import Permutation
from .features import Features

Batch = dict[str, Any]


def epoch_steps(
    lengths: np.ndarray, global_batch_size: int, pool_batches: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Return the items of every step of an epoch, with similar lengths within a step and steps in random order.

    The shuffled items are divided into pools of `pool_batches` steps, each pool is sorted by length and divided into
    steps, and the steps of the epoch are shuffled. The remainder of the last pool is a smaller step. The result depends
    only on (lengths, seed, epoch), not on the layout.

    Args:
        lengths: tokens per item, [n].
        pool_batches: 1 disables sorting by length.

    Returns:
        ceil(n / global_batch_size) arrays of item numbers.
    """
    count = len(lengths)
    order = Permutation(count, f"finetune/{seed}/{epoch}")(np.arange(count))
    steps = []
    for start in range(0, count, global_batch_size * pool_batches):
        pool = order[start : start + global_batch_size * pool_batches]
        if pool_batches > 1:
            pool = pool[np.argsort(lengths[pool], kind="stable")]
        steps += [pool[i : i + global_batch_size] for i in range(0, len(pool), global_batch_size)]
    shuffled = Permutation(len(steps), f"finetune_steps/{seed}/{epoch}")(np.arange(len(steps)))
    return [steps[i] for i in shuffled] if pool_batches > 1 else steps


@dataclass(frozen=True)
class TrainingSteps:
    """The steps of a training run, each as a list of one data rank's micro-batches.

    Rank r of W takes items r, r + W, ... of a step. If a step has fewer items than ranks, a rank without an item takes
    the first one with weight 0, because all ranks must take part in the gradient all-reduce.

    Args:
        features: of the training set.
        global_batch_size, micro_batch_size: items per step and per forward pass.
        num_epochs, seed, pool_batches: see `epoch_steps`.
        dp_rank, dp_size: r and W.
    """

    features: Features
    global_batch_size: int
    micro_batch_size: int
    num_epochs: int
    seed: int
    pool_batches: int
    dp_rank: int = 0
    dp_size: int = 1

    def __len__(self) -> int:
        return -(-len(self.features) // self.global_batch_size) * self.num_epochs

    def __iter__(self) -> Iterator[list[Batch]]:
        lengths = self.features.lengths()
        for epoch in range(self.num_epochs):
            number = epoch * len(self.features)  # of the step's first item, counted over the whole run
            for step in epoch_steps(lengths, self.global_batch_size, self.pool_batches, self.seed, epoch):
                yield self._share(step, number)
                number += len(step)

    def _share(self, step: np.ndarray, number: int) -> list[Batch]:
        places = np.arange(self.dp_rank, len(step), self.dp_size)
        weight = 1.0 if len(places) else 0.0
        places = places if len(places) else np.zeros(1, dtype=np.int64)
        micro_batches, choices = [], self.features.num_choices
        for i in range(0, len(places), self.micro_batch_size):
            mine = places[i : i + self.micro_batch_size]
            batch = collate(self.features, step[mine])
            batch["weights"] = torch.full((len(mine),), weight, dtype=torch.float64)
            sequences = (number + mine)[:, None] * choices + np.arange(choices)  # those of an item are consecutive
            batch["dropout_numbers"] = torch.from_numpy(sequences.ravel())
            micro_batches.append(batch)
        return micro_batches


@dataclass(frozen=True)
class ScoringBatches:
    """Batches of similar length that cover every item of the given sets once over the data ranks, longest first.

    It deliberately has no `__len__`: Lightning skips validation on a rank whose loader has length 0, and the other
    ranks would wait for it.

    Args:
        sets: features by name.
        num_sequences: maximum per forward pass; the sequences of an item stay together.
    """

    sets: dict[str, Features]
    num_sequences: int
    dp_rank: int = 0
    dp_size: int = 1

    def __iter__(self) -> Iterator[Batch]:
        for name, features in self.sets.items():
            order = np.argsort(-features.lengths(), kind="stable")
            size = max(1, self.num_sequences // features.num_choices)
            for start in range(self.dp_rank * size, len(order), self.dp_size * size):
                items = order[start : start + size]
                yield collate(features, items) | {"set": name, "items": items}


def collate(features: Features, items: np.ndarray) -> Batch:
    """Build the tensors of some items, padded to the longest.

    Shapes:
        b sequences (items x choices) of at most s tokens: `tokens`, `token_types` int64 [b, s]; `attention_mask` bool
        [b, s], None without padding; `labels` int64 [items] or [items, 2], or fp64 [items].
    """
    choices = features.num_choices
    rows = (items[:, None] * choices + np.arange(choices)).ravel()
    starts = features.starts[rows]
    lengths = features.starts[rows + 1] - starts
    places = np.arange(lengths.max())
    is_real = places < lengths[:, None]
    tokens = np.zeros(is_real.shape, dtype=np.int64)  # padding is masked, so its id does not matter
    tokens[is_real] = features.tokens[(starts[:, None] + places)[is_real]]
    types = is_real & (places >= features.second_starts[rows][:, None])
    return {
        "tokens": torch.from_numpy(tokens),
        "token_types": torch.from_numpy(types.astype(np.int64)),
        "attention_mask": None if is_real.all() else torch.from_numpy(is_real),
        "labels": torch.from_numpy(np.ascontiguousarray(features.labels[items])),
        "lengths": lengths,
    }
