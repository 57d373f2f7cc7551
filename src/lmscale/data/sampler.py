"""The samples of a run, how many are scored, and their global order: a function of the seed alone."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..config.checks import refuse
from ..config.data import DataConfig
from ..config.pretrain import RunConfig
from .permutation import Permutation
from .prepare import PreparedCorpus

DATASET_SHIFT = 40  # bits of a reference's index for the sample; the dataset's number is stored above them


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
        if len(self.weights) == 1:
            return np.zeros(last - first, dtype=np.int64), np.arange(first, last)
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


class EpochShuffle:
    """The order of samples that are shuffled again in every epoch.

    Args:
        size: samples per epoch.
        name: seed of the shuffles, with the epoch's number.
    """

    def __init__(self, size: int, name: str) -> None:
        self.size, self.name = size, name
        self._shuffles: dict[int, Permutation] = {}

    def __call__(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epochs and indices of the samples number `places`, ascending, in the run; all int64 [n]."""
        epochs, within = np.divmod(places, self.size)
        indices = np.empty_like(within)
        for start, end in pairwise([0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(places)]):
            epoch = int(epochs[start])
            if epoch not in self._shuffles:
                self._shuffles = {epoch: Permutation(self.size, f"{self.name}/{epoch}")}  # earlier ones are done with
            indices[start:end] = self._shuffles[epoch](within[start:end])
        return epochs, indices


Order = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # numbers of a dataset's samples -> epochs and indices


@dataclass(eq=False)
class GlobalBatchSampler:
    """Yield this data rank's slice of the global batch per optimizer step.

    The blend determines the dataset of sample number n of the run (step x global batch size + position in the batch),
    and the dataset's order determines which of its samples that is: it depends only on (seed, datasets, n), not on
    layout or micro-batch size. Rank r of W takes positions [r B/W, (r + 1) B/W).

    Args:
        orders: of each dataset.
        blend: how the datasets alternate.
        global_batch_size: B, sequences per step.
        dp_rank, dp_size: r and W.
        num_steps: last step of the run.
        start_step: steps already done.
    """

    orders: Sequence[Order]
    blend: Blend
    global_batch_size: int
    dp_rank: int
    dp_size: int
    num_steps: int
    start_step: int = 0

    def __post_init__(self) -> None:
        assert self.global_batch_size % self.dp_size == 0

    def __len__(self) -> int:
        """Steps of the whole run, including completed ones: Lightning accounts for restored steps itself."""
        return self.num_steps

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the references of each step: rows (sample number, epoch, dataset x 2^40 + index), int64 [B/W, 3]."""
        share = self.global_batch_size // self.dp_size
        for step in range(self.start_step, self.num_steps):
            first = step * self.global_batch_size + self.dp_rank * share
            yield self.references(first, first + share)

    def references(self, first: int, last: int) -> np.ndarray:
        """Return rows (sample number, epoch, dataset x 2^40 + index) of the samples [first, last), int64 [n, 3]."""
        which, places = self.blend.assign(first, last)
        rows = np.empty((last - first, 3), dtype=np.int64)
        rows[:, 0] = np.arange(first, last)
        for number in np.flatnonzero(np.bincount(which)):
            mine = which == number
            epochs, indices = self.orders[number](places[mine])
            rows[mine, 1], rows[mine, 2] = epochs, (number << DATASET_SHIFT) + indices
        return rows


class RunSamples:
    """The samples of a run: the datasets of both parts of a corpus, the order of training, and which are scored.

    Args:
        global_batch_size: sequences of a step.
        num_steps: of the whole run.
        num_validation_samples: sequences scored each time, the first ones of each dataset by its weight; None: all.

    Attributes:
        train, validation: the datasets.
        scored: references of the validation sequences, rows (number, 0, dataset x 2^40 + index), int64 [n, 3].

    Raises:
        ValueError: a part too small for one sample, or fewer validation sequences than requested.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        config: DataConfig,
        seed: int,
        global_batch_size: int,
        num_steps: int,
        num_validation_samples: int | None,
    ) -> None:
        self.corpus, self.seed, self.global_batch_size, self.num_steps = corpus, seed, global_batch_size, num_steps
        parts = corpus.parts["train"], corpus.parts["validation"]
        self.blend, self.validation_blend = (Blend([part.weight for part in each]) for each in parts)
        num_samples, make = self.blend.counts(num_steps * global_batch_size), corpus.make_samples
        # Validation first: a sequence length that fits it usually fits the larger training part too.
        self.validation = [
            make(corpus, "validation", part, config, seed, number) for number, part in enumerate(parts[1])
        ]
        self.train = [
            make(corpus, "train", part, config, seed, number, num_samples[number])
            for number, part in enumerate(parts[0])
        ]
        self.scored = self._order_validation(config.seq_length, num_validation_samples)

    def _order_validation(self, seq_length: int, num_samples: int | None) -> np.ndarray:
        available = [len(samples) for samples in self.validation]
        if num_samples is None:
            which = np.repeat(np.arange(len(available)), available)
            places = np.concatenate([np.arange(count) for count in available])
        else:
            parts, shares = self.corpus.parts["validation"], self.validation_blend.counts(num_samples)
            for part, count, wanted in zip(parts, available, shares, strict=True):
                if wanted > count:
                    of = f" of {part.prefix} ({wanted} by its weight)" if len(parts) > 1 else ""
                    rule = f"at most the validation part's {count} sequences of {seq_length} tokens{of}"
                    refuse("trainer.num_validation_samples", rule, num_samples)
            which, places = self.validation_blend.assign(0, num_samples)
        return np.stack([np.arange(len(which)), np.zeros_like(which), (which << DATASET_SHIFT) + places], axis=1)

    def at_most(self, num_samples: int) -> int | None:
        """The largest number of validation sequences up to `num_samples` of which each dataset has its share by
        weight; None: all."""
        available = [len(samples) for samples in self.validation]
        if sum(available) <= num_samples:
            return None

        def is_above(number: int) -> bool:
            return any(
                wanted > count for wanted, count in zip(self.validation_blend.counts(number), available, strict=True)
            )

        return bisect_left(range(num_samples + 1), True, key=is_above) - 1

    def sampler(self, dp_rank: int = 0, dp_size: int = 1, start_step: int = 0) -> GlobalBatchSampler:
        """The order of the training samples of one data rank."""
        if self.corpus.shuffles_documents:
            orders = [samples.order for samples in self.train]
        else:  # one dataset
            orders = [EpochShuffle(len(self.train[0]), f"order/{self.seed}")]
        place = self.global_batch_size, dp_rank, dp_size, self.num_steps, start_step
        return GlobalBatchSampler(orders, self.blend, *place)


def samples_of(run: RunConfig, corpus: PreparedCorpus, num_validation: int | None) -> RunSamples:
    """The run's samples in their order; see `RunSamples` for errors."""
    return RunSamples(corpus, run.data, run.seed, run.global_batch_size, run.trainer.max_steps, num_validation)
