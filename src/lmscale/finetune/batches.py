"""Which items a step holds, how they are dealt to the ranks, and their tensors: nothing dropped, little padding."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..data.permutation import Permutation
from .features import Features

Batch = dict[str, Any]


def epoch_steps(
    lengths: np.ndarray, global_batch_size: int, pool_batches: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Items of every step of an epoch: each item once, a step's items of similar length, steps in random order.

    The shuffled items are cut into pools of `pool_batches` steps; a pool is sorted by length and cut into steps; the
    steps of the epoch are shuffled. The last pool's remainder is a smaller step. A function of (lengths, seed, epoch)
    alone: no layout changes it.

    Args:
        lengths: tokens of each item, [n].
        pool_batches: 1 keeps the shuffle as it is.

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


class TrainingSteps:
    """Every step of a training as the list of one data rank's micro-batches.

    Rank r of W takes items r, r + W, ... of a step. Where a step has fewer items than ranks, a rank without one takes
    the first with weight 0, because all ranks must take part in the sum of the gradients.

    Args:
        features: of the training set.
        global_batch_size, micro_batch_size: items of a step, and of a forward pass.
        num_epochs, seed, pool_batches: see `epoch_steps`.
        dp_rank, dp_size: r and W.
    """

    def __init__(
        self,
        features: Features,
        global_batch_size: int,
        micro_batch_size: int,
        num_epochs: int,
        seed: int,
        pool_batches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        self.features, self.lengths = features, features.lengths()
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.num_epochs, self.seed, self.pool_batches = num_epochs, seed, pool_batches
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.steps_per_epoch = -(-len(features) // global_batch_size)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.num_epochs

    def __iter__(self) -> Iterator[list[Batch]]:
        for epoch in range(self.num_epochs):
            number = epoch * len(self.features)  # of the first item of the step, over the whole training
            for step in epoch_steps(self.lengths, self.global_batch_size, self.pool_batches, self.seed, epoch):
                yield self._share(step, number)
                number += len(step)

    def _share(self, step: np.ndarray, number: int) -> list[Batch]:
        places = np.arange(self.dp_rank, len(step), self.dp_size)
        weight = 1.0 if len(places) else 0.0
        places = places if len(places) else np.zeros(1, dtype=np.int64)
        micro_batches = []
        for i in range(0, len(places), self.micro_batch_size):
            mine = places[i : i + self.micro_batch_size]
            batch = collate(self.features, step[mine])
            batch["weights"] = torch.full((len(mine),), weight, dtype=torch.float64)
            batch["numbers"] = torch.from_numpy(number + mine)
            batch["step_items"] = len(step)
            micro_batches.append(batch)
        return micro_batches


class ScoringBatches:
    """Every item of some sets once over the data ranks, longest first, as batches of similar length.

    It has no length on purpose: Lightning leaves the whole validation out on a rank whose loader has length 0, and the
    others would wait for it.

    Args:
        sets: features by name.
        num_sequences: of a forward pass, at most (an item's sequences stay together).
    """

    def __init__(self, sets: dict[str, Features], num_sequences: int, dp_rank: int = 0, dp_size: int = 1) -> None:
        self.sets, self.num_sequences = sets, num_sequences
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def __iter__(self) -> Iterator[Batch]:
        for name, features in self.sets.items():
            order = np.argsort(-features.lengths(), kind="stable")
            size = max(1, self.num_sequences // features.num_choices)
            for start in range(self.dp_rank * size, len(order), self.dp_size * size):
                items = order[start : start + size]
                yield collate(features, items) | {"set": name, "items": items}


def collate(features: Features, items: np.ndarray) -> Batch:
    """Tensors of some items, padded to the longest of them.

    Shapes:
        b sequences (items x choices) of at most s tokens: `tokens`, `token_types` int64 [b, s]; `attention_mask` bool
        [b, s], None where nothing is padded; `labels` int64 [items] or [items, 2].
    """
    choices = features.num_choices
    rows = (items[:, None] * choices + np.arange(choices)).ravel()
    starts = features.starts[rows]
    lengths = features.starts[rows + 1] - starts
    places = np.arange(lengths.max())
    is_real = places < lengths[:, None]
    tokens = np.zeros(is_real.shape, dtype=np.int64)  # [PAD] is masked, its id does not matter
    tokens[is_real] = features.tokens[(starts[:, None] + places)[is_real]]
    types = is_real & (places >= features.second_starts[rows][:, None])
    return {
        "tokens": torch.from_numpy(tokens),
        "token_types": torch.from_numpy(types.astype(np.int64)),
        "attention_mask": None if is_real.all() else torch.from_numpy(is_real),
        "labels": torch.from_numpy(np.ascontiguousarray(features.labels[items])),
        "lengths": lengths,
    }
