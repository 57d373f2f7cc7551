"""Blend datasets in fixed proportions: the dataset of each sample of the run, and its number within that dataset."""

from collections.abc import Sequence

import numpy as np


class Blend:
    """A sequence of dataset numbers with given weights; any range of it is computed independently.

    Sample k of dataset d has time (k + 1/2) / w_d, and samples are ordered by time (ties: by dataset). Up to any time t
    a dataset has contributed w_d t samples, rounded. Among the first n samples of the run, each of D datasets therefore
    has n w_d samples to within 1/2 + w_d max(D - 2, 0) / 2, at most 1 for three datasets or a small weight.

    Args:
        weights: one per dataset, above 0; normalized to sum to 1.

    Raises:
        ValueError: a weight is not above 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise ValueError(f"a dataset's weight must be above 0, but is {weight}")
        self.weights = np.asarray(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)

    def assign(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for the samples [first, last) of the run, the dataset and the sample's number within it.

        Shapes:
            both int64 [last - first].
        """
        begins, which, places = self._around(first, last)
        mine = slice(first - sum(begins), last - sum(begins))
        return which[mine], places[mine]

    def counts(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples each dataset contributes."""
        begins, which, _ = self._around(num_samples, num_samples)
        counted = np.bincount(which[: num_samples - sum(begins)], minlength=len(begins))
        return [begin + int(count) for begin, count in zip(begins, counted, strict=True)]

    def _around(self, first: int, last: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the samples [first, last) with some before and after them, in order.

        Returns:
            how many samples each dataset contributed before them; dataset and number of each.
        """
        slack = len(self.weights) / 2 + 1  # the time of sample n is within D/2 of n
        begins = [self._count_before(dataset, first - slack) for dataset in range(len(self.weights))]
        ends = [self._count_before(dataset, last + slack) for dataset in range(len(self.weights))]
        pairs = list(zip(begins, ends, strict=True))
        which = np.repeat(np.arange(len(pairs)), [end - begin for begin, end in pairs])
        places = np.concatenate([np.arange(begin, end) for begin, end in pairs])
        order = np.argsort((places + 0.5) / self.weights[which], kind="stable")
        return begins, which[order], places[order]

    def _count_before(self, dataset: int, time: float) -> int:
        """Count the samples of a dataset before this time."""
        weight = self.weights[dataset]
        count = max(0, int(time * weight + 0.5))
        # Samples are ordered by the quotient, and the product above may round differently.
        while count > 0 and (count - 0.5) / weight >= time:
            count -= 1
        while (count + 0.5) / weight < time:
            count += 1
        return count
