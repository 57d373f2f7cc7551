"""The order of samples: a function of the seed alone, dealt out to the data ranks."""

import hashlib
from collections.abc import Iterator

import numpy as np


class GlobalBatchSampler:
    """For each optimizer step this data rank's share of the global batch.

    Sample number n of the run (step x global batch + place in the batch) is sample `permutation_epoch[n % N]` of epoch
    `n // N`: the order depends on (seed, N, n) and on nothing else, neither the layout nor the micro-batch. Rank r of W
    takes places [r B/W, (r + 1) B/W). Nothing is dropped or repeated where epochs meet.

    Args:
        num_samples: N, samples of an epoch.
        global_batch_size: B, sequences of a step.
        dp_rank, dp_size: r and W.
        num_steps: where the run ends.
        start_step: steps already done.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        num_steps: int,
        start_step: int = 0,
    ) -> None:
        assert global_batch_size % dp_size == 0
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.share = global_batch_size // dp_size
        self.first_place = dp_rank * self.share
        self.seed = seed
        self.num_steps = num_steps
        self.start_step = start_step
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Steps of the whole run, the ones done included: Lightning adds what it has restored itself."""
        return self.num_steps

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        """Lists of (sample number, epoch, index), one list a step."""
        for step in range(self.start_step, self.num_steps):
            first = step * self.global_batch_size + self.first_place
            yield [self._reference(number) for number in range(first, first + self.share)]

    def indices_of(self, first: int, last: int) -> np.ndarray:
        """Indices of the samples with numbers [first, last) of one epoch, int64 [last - first]."""
        epoch, place = divmod(first, self.num_samples)
        return self._permutation_of(epoch)[place : place + last - first]

    def _reference(self, number: int) -> tuple[int, int, int]:
        epoch, place = divmod(number, self.num_samples)
        return number, epoch, int(self._permutation_of(epoch)[place])

    def _permutation_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            key = hashlib.blake2b(f"order/{self.seed}/{epoch}".encode(), digest_size=8).digest()
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            self._epoch, self._permutation = epoch, generator.permutation(self.num_samples)
        return self._permutation
