"""The global order of samples, a function of the seed alone, and its division among data ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from .blend import Blend
from .permutation import Permutation

DATASET_SHIFT = 40  # bits of a reference's index for the sample; the dataset's number is stored above them


class OrderedSamples(Protocol):
    """A dataset that determines the order of its own samples."""

    def order(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epochs and indices of its samples number `places` in the run, both int64 of that shape."""


class GlobalBatchSampler:
    """Yield this data rank's slice of the global batch per optimizer step.

    Sample number n of the run (step x global batch size + position in the batch) is sample `permutation_epoch[n % N]`
    of epoch `n // N`: the order depends only on (seed, N, n), not on layout or micro-batch size. Rank r of W takes
    positions [r B/W, (r + 1) B/W). No sample is dropped or repeated between epochs.

    Args:
        num_samples: N, samples per epoch.
        global_batch_size: B, sequences per step.
        dp_rank, dp_size: r and W.
        num_steps: last step of the run.
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
        self._epoch, self._permutation = -1, None

    def __len__(self) -> int:
        """Steps of the whole run, including completed ones: Lightning accounts for restored steps itself."""
        return self.num_steps

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the references of each step: rows (sample number, epoch, index), int64 [B/W, 3]."""
        for step in range(self.start_step, self.num_steps):
            first = step * self.global_batch_size + self.first_place
            yield self.references(first, first + self.share)

    def references(self, first: int, last: int) -> np.ndarray:
        """Return rows (sample number, epoch, index) of samples number [first, last), int64 [last - first, 3]."""
        numbers = np.arange(first, last)
        return np.stack([numbers, *in_epochs(numbers, self.num_samples, self._permutation_of)], axis=1)

    def indices_of(self, first: int, last: int) -> np.ndarray:
        """Return the indices of samples number [first, last), int64 [last - first]."""
        return self.references(first, last)[:, 2]

    def _permutation_of(self, epoch: int) -> Permutation:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, Permutation(self.num_samples, f"order/{self.seed}/{epoch}")
        return self._permutation


class BlendedBatchSampler(GlobalBatchSampler):
    """The same for datasets that order their own samples, blended in fixed proportions.

    The blend determines the dataset of sample n, and the dataset determines which of its samples that is. A reference's
    index is dataset x 2^40 + the sample's index. The epoch of the base class is the whole run.

    Args:
        datasets, blend: the datasets and how they alternate.
        global_batch_size, dp_rank, dp_size, num_steps, start_step: as above.
    """

    def __init__(
        self,
        datasets: Sequence[OrderedSamples],
        blend: Blend,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        num_steps: int,
        start_step: int = 0,
    ) -> None:
        super().__init__(
            num_steps * global_batch_size, global_batch_size, dp_rank, dp_size, seed, num_steps, start_step
        )
        self.datasets, self.blend = datasets, blend

    def references(self, first: int, last: int) -> np.ndarray:
        """Return rows (sample number, epoch, dataset x 2^40 + index) of the samples [first, last), int64 [n, 3]."""
        which, places = self.blend.assign(first, last)
        rows = np.empty((last - first, 3), dtype=np.int64)
        rows[:, 0] = np.arange(first, last)
        for number in np.unique(which):
            mine = which == number
            epochs, indices = self.datasets[number].order(places[mine])
            rows[mine, 1], rows[mine, 2] = epochs, (number << DATASET_SHIFT) + indices
        return rows


def in_epochs(
    places: np.ndarray, num_samples: int, permutation_of: Callable[[int], Permutation]
) -> tuple[np.ndarray, np.ndarray]:
    """Return epochs and indices of samples that are reshuffled in every epoch, both int64 of the shape of `places`.

    Args:
        places: numbers of the samples in the run.
        num_samples: per epoch.
        permutation_of: returns the shuffle of an epoch.
    """
    epochs, within = np.divmod(places, num_samples)
    indices = np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
        mine = epochs == epoch
        indices[mine] = permutation_of(epoch)(within[mine])
    return epochs, indices
