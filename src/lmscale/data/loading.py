"""The parts of a pretraining loader: look up samples, cut steps into micro-batches."""

import signal
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .bert_dataset import BERTDataset
from .gpt_dataset import GPTDataset
from .sampler import DATASET_SHIFT

Samples = GPTDataset | BERTDataset
MicroBatch = dict[str, Tensor]


class References(Dataset):
    """Looks up references, rows (sample number, epoch, dataset x 2^40 + index), in their datasets."""

    def __init__(self, datasets: list[Samples]) -> None:
        self.datasets = datasets

    def __getitems__(self, references: np.ndarray) -> dict[str, np.ndarray]:
        numbers, epochs, places = references.T
        which, indices = places >> DATASET_SHIFT, places & ((1 << DATASET_SHIFT) - 1)
        batch: dict[str, np.ndarray] = {}
        for number in np.unique(which).tolist():
            mine = np.flatnonzero(which == number)
            for key, values in self.datasets[number].batch(epochs[mine], indices[mine]).items():
                if len(mine) == len(references):
                    batch[key] = values
                else:
                    batch.setdefault(key, np.empty((len(references), *values.shape[1:]), values.dtype))[mine] = values
        return batch | {"sample_numbers": numbers, "sample_indices": places}


class CutStep:
    """Cuts the samples of one step into micro-batches; a class, so that worker processes can pickle it."""

    def __init__(self, micro_batch_size: int, by_length: bool) -> None:
        self.micro_batch_size, self.by_length = micro_batch_size, by_length

    def __call__(self, step: dict[str, np.ndarray]) -> list[MicroBatch]:
        if self.by_length and "attention_mask" in step:
            order = np.argsort(-step["attention_mask"].sum(axis=1), kind="stable")
            step = {key: values[order] for key, values in step.items()}
        whole = as_tensors(step)
        starts = range(0, len(step["sample_numbers"]), self.micro_batch_size)
        return [{key: value[i : i + self.micro_batch_size] for key, value in whole.items()} for i in starts]


class Unsized:
    """Batches that can be iterated over but have no length."""

    def __init__(self, batches: Iterable) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator:
        return iter(self.batches)


class Sized(Unsized):
    """The same with a length: a loader to which Lightning adds no sampler."""

    def __len__(self) -> int:
        return len(self.batches)


class MicroBatches:
    """The micro-batches of a loader of steps, one by one; they are Lightning's batches.

    The first of each step has `step_counts`, int64 [number of terms]: this rank's count of each loss term over the
    whole step. The step's loss can then be divided by the counts of all ranks before any backward pass.

    Where the Trainer ends the epoch within a step (`limit_train_batches`), the step has only the micro-batches before.

    Args:
        open_steps: returns the loader, whose items are lists of the micro-batches of a step.
        length: micro-batches of a whole epoch, including completed ones: Lightning subtracts those it has restored.
        loss_counts: the counts of one micro-batch.
        on_last: called before the last micro-batch of a step is returned.
        num_left: how many micro-batches the Trainer will still take in its epoch; asked when it takes the first.
    """

    def __init__(
        self,
        open_steps: Callable[[], DataLoader],
        length: int,
        loss_counts: Callable[[MicroBatch], Tensor],
        on_last: Callable[[], None],
        num_left: Callable[[], int],
    ) -> None:
        self.open_steps, self.length = open_steps, length
        self.loss_counts, self.on_last, self.num_left = loss_counts, on_last, num_left

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[MicroBatch]:
        num_left = self.num_left()
        for whole_step in self.open_steps():
            first, *others = whole_step[:num_left]
            num_left -= 1 + len(others)
            counts = torch.stack([self.loss_counts(micro_batch) for micro_batch in (first, *others)]).sum(dim=0)
            micro_batches = [first | {"step_counts": pinned_like(counts.long(), first["tokens"])}, *others]
            for micro_batch in micro_batches:
                if micro_batch is micro_batches[-1]:
                    self.on_last()
                yield micro_batch


def as_tensors(batch: dict[str, np.ndarray]) -> MicroBatch:
    """The arrays as tensors that share their memory."""
    return {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in batch.items()}


def pinned_like(tensor: Tensor, loaded: Tensor) -> Tensor:
    """`tensor`, pinned if the loader has pinned `loaded`: the copy of pageable memory to a GPU makes the host wait."""
    return tensor.pin_memory() if loaded.is_pinned() else tensor


def ignore_signals(worker: int) -> None:
    """Leave the signals at which a run saves to its ranks: in a loader process, ignore SIGTERM and SIGUSR1.

    Schedulers send them to every process of a job. A loader process that ended would end its rank before it has saved.
    """
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
