"""Several datasets in fixed proportions: which dataset gives sample n of the run, and the how-manieth of its own."""

from collections.abc import Sequence

import numpy as np


class Blend:
    """A sequence of dataset numbers with given weights; any stretch of it is computed by itself.

    Sample k of dataset d has its time (k + 1/2) / w_d, and the samples come by time (a tie: by dataset). Up to any
    time t a dataset has given w_d t samples, rounded, so among the first n samples of the run each of D datasets has
    n w_d to within 1/2 + w_d max(D - 2, 0) / 2: at most 1 for three datasets, and for the small ones of many.

    Args:
        weights: one for each dataset, above 0; divided by their sum.

    Raises:
        ValueError: a weight that is not above 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise ValueError(f"a dataset's weight must be above 0, but is {weight}")
        self.weights = np.asarray(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)

    def assign(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """For the samples [first, last) of the run the dataset, and the sample's number among that dataset's own.

        Shapes:
            both int64 [last - first].
        """
        begins, which, places = self._around(first, last)
        mine = slice(first - sum(begins), last - sum(begins))
        return which[mine], places[mine]

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each dataset gives."""
        begins, which, _ = self._around(num_samples, num_samples)
        counted = np.bincount(which[: num_samples - sum(begins)], minlength=len(begins))
        return [begin + int(count) for begin, count in zip(begins, counted, strict=True)]

    def _around(self, first: int, last: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The samples [first, last) with some before and behind them, in order.

        Returns:
            how many each dataset has given before them; dataset and number of each.
        """
        slack = len(self.weights) / 2 + 1  # n samples have been given at a time within D/2 of n
        begins = [self._given_before(dataset, first - slack) for dataset in range(len(self.weights))]
        ends = [self._given_before(dataset, last + slack) for dataset in range(len(self.weights))]
        pairs = list(zip(begins, ends, strict=True))
        which = np.repeat(np.arange(len(pairs)), [end - begin for begin, end in pairs])
        places = np.concatenate([np.arange(begin, end) for begin, end in pairs])
        order = np.argsort((places + 0.5) / self.weights[which], kind="stable")
        return begins, which[order], places[order]

    def _given_before(self, dataset: int, time: float) -> int:
        """Samples of a dataset whose time lies before this one."""
        weight = self.weights[dataset]
        count = max(0, int(time * weight + 0.5))
        # The division that orders the samples decides, not the product, which may round the other way.
        while count > 0 and (count - 0.5) / weight >= time:
            count -= 1
        while (count + 0.5) / weight < time:
            count += 1
        return count
