"""The Lightning datamodule: optimizer steps for training, every validation sequence once."""

import hashlib
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..config import BatchConfig
from ..config.data import DataConfig
from ..config.family import family_of, load
from .bert_dataset import IGNORE_LABEL, BERTDataset
from .blend import Blend
from .gpt_dataset import GPTDataset
from .prepared import CorpusPart, PreparedCorpus
from .sampler import DATASET_SHIFT, BlendedBatchSampler, GlobalBatchSampler

Samples = GPTDataset | BERTDataset


class _References(Dataset):
    """Looks up references, rows (sample number, epoch, dataset x 2^40 + index), in the datasets they belong to."""

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


class _MicroBatches:
    """Cuts the samples of one step into micro-batches; one class, because worker processes must pickle it."""

    def __init__(self, micro_batch_size: int, by_length: bool) -> None:
        self.micro_batch_size, self.by_length = micro_batch_size, by_length

    def __call__(self, step: dict[str, np.ndarray]) -> list[dict[str, Tensor]]:
        if self.by_length and "attention_mask" in step:
            order = np.argsort(-step["attention_mask"].sum(axis=1), kind="stable")
            step = {key: values[order] for key, values in step.items()}
        whole = _tensors(step)
        starts = range(0, len(step["sample_numbers"]), self.micro_batch_size)
        return [{key: value[i : i + self.micro_batch_size] for key, value in whole.items()} for i in starts]


class _Unsized:
    """A batch sampler that can be gone through but has no length."""

    def __init__(self, batches: list) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator:
        return iter(self.batches)


def _tensors(batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in batch.items()}


class PretrainDataModule(L.LightningDataModule):
    """Samples of a prepared corpus, dealt out by data rank.

    Training: an item of the loader is one optimizer step of this data rank, a list of micro-batches. Validation: items
    are micro-batches; the first `num_validation_samples` sequences of the validation part, each on one data rank.

    A micro-batch is a dict of tensors: GPT `tokens`, `labels` int64 [b, s]; BERT also `token_types`, `attention_mask`
    [b, s], `sop_labels` [b] and, as it travels, `scored` [m], where the flattened labels are not -100, and no mask but
    None where nothing is padded, so that attention takes its fastest kernel; both `sample_numbers` int64 [b], counted
    over the whole run, and `sample_indices` int64 [b], places in the dataset.

    Args:
        by_length: of a step's sequences on a rank the longest come first, so that most micro-batches have no padding.
            What a micro-batch holds then depends on its lengths, which a mean of the micro-batches' means would feel.
        completed_steps, an attribute set by the training loop: where the next training loader begins. It is saved with
            checkpoints as consumed samples.

    Raises:
        ValueError: a split too small for one sample, or fewer validation sequences than asked for.
    """

    def __init__(
        self,
        prepared: PreparedCorpus,
        config: DataConfig,
        batch: BatchConfig,
        seed: int,
        num_steps: int,
        num_validation_samples: int | None,
        by_length: bool = False,
    ) -> None:
        super().__init__()
        identity = prepared.manifest["train"]["sha256"] + prepared.manifest["tokenizer"]
        self.corpus_hash = hashlib.sha256(identity.encode()).hexdigest()[:16]  # of the training text, tokenized
        self.config, self.batch, self.seed, self.num_steps = config, batch, seed, num_steps
        self.by_length = by_length
        self.is_blended = prepared.shuffles_documents
        self.blend = Blend([part.weight for part in prepared.parts["train"]])
        num_samples = self.blend.counts(num_steps * batch.global_batch_size)
        self.train_samples = [
            make_dataset(prepared, "train", part, config, seed, number, num_samples[number])
            for number, part in enumerate(prepared.parts["train"])
        ]
        self.validation_samples = [
            make_dataset(prepared, "validation", part, config, seed, number)
            for number, part in enumerate(prepared.parts["validation"])
        ]
        self._validation = self._order_validation(prepared.parts["validation"], num_validation_samples)
        self.num_validation_samples = len(self._validation)
        self.completed_steps = 0

    def _order_validation(self, parts: tuple[CorpusPart, ...], num_samples: int | None) -> np.ndarray:
        """References of the validation sequences: all of every dataset, or the first of each as the weights have it."""
        available = [len(samples) for samples in self.validation_samples]
        if num_samples is None:
            which = np.repeat(np.arange(len(parts)), available)
            places = np.concatenate([np.arange(count) for count in available])
        else:
            blend = Blend([part.weight for part in parts])
            for part, count, wanted in zip(parts, available, blend.counts(num_samples), strict=True):
                if wanted > count:
                    of = f" of {part.prefix} ({wanted} by its weight)" if len(parts) > 1 else ""
                    raise ValueError(
                        f"`trainer.num_validation_samples` must be at most the validation part's {count} sequences of "
                        f"{self.config.seq_length} tokens{of}, but is {num_samples}"
                    )
            which, places = blend.assign(0, num_samples)
        return np.stack([np.arange(len(which)), np.zeros_like(which), (which << DATASET_SHIFT) + places], axis=1)

    def train_dataloader(self) -> DataLoader:
        """Steps from `completed_steps` on."""
        parallel = self.trainer.strategy.parallel
        sampler = self.sampler(parallel.dp_rank, parallel.dp_size, self.completed_steps)
        collate = _MicroBatches(self.batch.micro_batch_size, self.by_length)
        return self._loader(self.train_samples, batch_sampler=sampler, collate_fn=collate)

    def sampler(self, dp_rank: int = 0, dp_size: int = 1, start_step: int = 0) -> GlobalBatchSampler:
        """The order of the training samples, as one data rank meets it."""
        layout = self.batch.global_batch_size, dp_rank, dp_size, self.seed, self.num_steps, start_step
        if self.is_blended:
            return BlendedBatchSampler(self.train_samples, self.blend, *layout)
        return GlobalBatchSampler(len(self.train_samples[0]), *layout)

    def val_dataloader(self) -> DataLoader:
        """This data rank's validation sequences; the last micro-batch may be smaller."""
        parallel = self.trainer.strategy.parallel
        borders = [self.num_validation_samples * r // parallel.dp_size for r in range(parallel.dp_size + 1)]
        mine = self._validation[borders[parallel.dp_rank] : borders[parallel.dp_rank + 1]]
        size = self.batch.micro_batch_size
        batches = [mine[i : i + size] for i in range(0, len(mine), size)]
        # Lightning would skip the whole validation, its closing all-reduce included, on a rank whose loader has length
        # 0, and the other ranks would wait for ever: where some rank has nothing, no rank's loader tells its length.
        some_rank_is_idle = self.num_validation_samples < parallel.dp_size
        sampler = _Unsized(batches) if some_rank_is_idle else batches
        return self._loader(self.validation_samples, batch_sampler=sampler, collate_fn=_tensors)

    def _loader(self, samples: list[Samples], **kwargs: Any) -> DataLoader:
        # A generator of its own: a loader that draws from torch's would shift the dropout of one rank against another.
        return DataLoader(
            _References(samples),
            num_workers=self.config.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(0),
            **kwargs,
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the scored positions of padded samples, and whether they need their mask, while both are on the host, so
        that no GPU has to be waited for."""
        for micro_batch in batch if isinstance(batch, list) else [batch]:
            if "attention_mask" in micro_batch:
                is_scored = micro_batch["labels"].flatten() != IGNORE_LABEL
                micro_batch["scored"] = is_scored.nonzero().squeeze(1)
                if micro_batch["attention_mask"].all():
                    micro_batch["attention_mask"] = None
        return batch

    def state_dict(self) -> dict[str, int]:
        """Sequences consumed so far; with the seed, the whole state of the data order."""
        return {"consumed_samples": self.completed_steps * self.batch.global_batch_size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the consumed sequences.

        Raises:
            ValueError: they are not a whole number of this run's global batches.
        """
        consumed = state_dict["consumed_samples"]
        if consumed % self.batch.global_batch_size:
            raise ValueError(
                f"`global_batch_size` must divide the {consumed} sequences the checkpoint has consumed, "
                f"but is {self.batch.global_batch_size}"
            )
        self.completed_steps = consumed // self.batch.global_batch_size


def make_dataset(
    prepared: PreparedCorpus,
    split: str,
    part: CorpusPart,
    config: DataConfig,
    seed: int,
    number: int = 0,
    num_samples: int | None = None,
) -> Samples:
    """The samples of one dataset of a split, of the family the corpus was prepared for.

    Args:
        number: of the dataset in the blend.
        num_samples: how many the run takes from it; None where their order is not shuffled by the dataset.
    """
    make = load(family_of(prepared.architecture).samples)
    return make(prepared, split, part, config, seed, number, num_samples)
