"""The parts of a pretraining loader: look up samples, collate steps, cut them into micro-batches."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .bert_dataset import IGNORE_LABEL, BERTDataset
from .gpt_dataset import GPTDataset
from .sampler import DATASET_SHIFT
from .teacher_cache import TeacherCache

Samples = GPTDataset | BERTDataset
Batch = dict[str, Tensor]
_IDS = torch.int64, torch.int32


class References(Dataset):
    """Looks up references, rows (sample number, epoch, dataset x 2^40 + index), in their datasets and in a teacher's
    cache."""

    def __init__(self, datasets: list[Samples], cache: TeacherCache | None = None) -> None:
        self.datasets, self.cache = datasets, cache

    def __getitems__(self, references: np.ndarray) -> dict[str, np.ndarray]:
        numbers, epochs, places = references.T
        which, indices = places >> DATASET_SHIFT, places & ((1 << DATASET_SHIFT) - 1)
        batch: dict[str, np.ndarray] = {}
        for number in np.unique(which).tolist():
            mine = np.flatnonzero(which == number)
            for key, values in self.datasets[number].batch(epochs[mine], indices[mine]).items():
                batch.setdefault(key, np.empty((len(references), *values.shape[1:]), values.dtype))[mine] = values
        cached = {} if self.cache is None else self.cache.read(numbers)
        return batch | {"sample_numbers": numbers, "sample_indices": places} | cached


def collate_step(step: dict[str, np.ndarray], by_length: bool) -> Batch:
    """The samples of one step as tensors, by descending length if requested."""
    if by_length and "attention_mask" in step:
        order = np.argsort(-step["attention_mask"].sum(axis=1), kind="stable")
        step = {key: values[order] for key, values in step.items()}
    return as_tensors(step)


def cut_step(step: Batch, micro_batch_size: int | None) -> list[Batch]:
    """Cut a step into micro-batches, the last of which may be smaller; None: it is one.

    Raises:
        ValueError: a user's loader yields an empty step.
    """
    num_samples = len(step["tokens"])
    if num_samples == 0:
        raise ValueError(f"a batch of the DataLoader must have sequences, but `tokens` is {list(step['tokens'].shape)}")
    size = micro_batch_size or num_samples
    parts = ({key: x[i : i + size] for key, x in step.items()} for i in range(0, num_samples, size))
    return [trim_padding(keep_scored(part)) for part in parts]


def keep_scored(batch: Batch) -> Batch:
    """Of the rows of a teacher's cache [b, m, ...] those of scored positions, in their order, [n, ...]."""
    for name in {"teacher_log_p", "teacher_ids"} & batch.keys():
        rows = batch[name][scored_rows(batch["labels"], batch[name].shape[1])]
        batch = batch | {name: pinned_like(rows, batch["labels"])}
    return batch


def scored_rows(labels: Tensor, num_rows: int) -> Tensor:
    """Which of a sample's `num_rows` rows in a cache belong to its scored positions: the first ones; bool [b, m]."""
    return torch.arange(num_rows) < (labels != IGNORE_LABEL).sum(dim=1, keepdim=True)


def check_entries(batch: object, names: Iterable[str]) -> None:
    """Refuse a batch of a user's loader that has other entries.

    Raises:
        ValueError: it is no dict, or lacks one of these entries.
    """
    found = [name for name in names if isinstance(batch, dict) and name in batch]
    if len(found) < len(names):
        entries = f"a dict with {', '.join(batch)}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
        raise ValueError(f"a batch of the DataLoader must be a dict with {', '.join(names)}, but is {entries}")


def check_ids(batch: Batch, vocab_size: int) -> None:
    """Refuse ids that the model does not have; the embedding would take them for those of another rank, and be zero.

    Raises:
        ValueError: tokens or labels are not whole numbers [b, s], or one of them is not an id.
    """
    for name in ("tokens", "labels"):
        if name not in batch:
            continue
        ids, shape = batch[name], tuple(getattr(batch["tokens"], "shape", ()))
        if not isinstance(ids, Tensor) or ids.dtype not in _IDS or ids.dim() != 2 or tuple(ids.shape) != shape:
            found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(f"`{name}` must be an int64 or int32 tensor [b, s], as all of a batch, but is {found}")
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        wrong = wrong[wrong != IGNORE_LABEL] if name == "labels" else wrong
        if len(wrong):
            raise ValueError(
                f"`{name}` must be ids below the model's `vocab_size` ({vocab_size}), but one is {wrong[0].item()}"
            )


def trim_padding(batch: Batch) -> Batch:
    """Find the scored positions of padded samples and drop an unneeded mask, on the host: no GPU is waited for."""
    if not {"attention_mask", "labels"} <= batch.keys():
        return batch
    scored = (batch["labels"].flatten() != IGNORE_LABEL).nonzero().squeeze(1)
    mask = None if batch["attention_mask"].all() else batch["attention_mask"]
    return batch | {"attention_mask": mask, "scored": pinned_like(scored, batch["labels"])}


class Loader:
    """A loader that Lightning takes as it is: it adds no sampler, and asks for a new iterator in every epoch.

    Args:
        open_loader: returns the iterable of an epoch.
        length: batches of an epoch, including completed ones: Lightning subtracts those it has restored. None: unknown.
    """

    def __init__(self, open_loader: Callable[[], Iterable], length: int | None) -> None:
        self.open_loader, self.length = open_loader, length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length is unknown")
        return self.length

    def __iter__(self) -> Iterator:
        return iter(self.open_loader())


def as_tensors(batch: dict[str, np.ndarray]) -> Batch:
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


def end_loader_processes() -> None:
    """Kill the loader processes of this rank, which have nothing to save."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
