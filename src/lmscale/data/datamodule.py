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
from ..data_config import DataConfig
from .bert_dataset import BERTDataset
from .gpt_dataset import GPTDataset
from .prepare import PreparedCorpus
from .sampler import GlobalBatchSampler


class _References(Dataset):
    """Looks up references (sample number, epoch, index) of a GPT or BERT dataset."""

    def __init__(self, samples: GPTDataset | BERTDataset) -> None:
        self.samples = samples

    def __getitem__(self, reference: tuple[int, int, int]) -> dict[str, Any]:
        number, epoch, index = reference
        places = {"sample_numbers": np.int64(number), "sample_indices": np.int64(index)}
        return self.samples.sample(epoch, index) | places


class _MicroBatches:
    """Collates the samples of one step into micro-batches; one class, because worker processes must pickle it."""

    def __init__(self, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size

    def __call__(self, samples: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
        size = self.micro_batch_size
        return [_stack(samples[i : i + size]) for i in range(0, len(samples), size)]


class _Unsized:
    """A batch sampler that can be gone through but has no length."""

    def __init__(self, batches: list) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator:
        return iter(self.batches)


def _stack(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


class PretrainDataModule(L.LightningDataModule):
    """Samples of a prepared corpus, dealt out by data rank.

    Training: an item of the loader is one optimizer step of this data rank, a list of micro-batches. Validation: items
    are micro-batches; the first `num_validation_samples` sequences of the validation part, each on one data rank.

    A micro-batch is a dict of tensors: GPT `tokens`, `labels` int64 [b, s]; BERT also `token_types`, `attention_mask`
    [b, s], `sop_labels` [b]; both `sample_numbers` int64 [b], counted over the whole run, and `sample_indices` int64
    [b], places in the dataset.

    Args:
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
    ) -> None:
        super().__init__()
        identity = prepared.manifest["train"]["sha256"] + prepared.manifest["tokenizer"]
        self.corpus_hash = hashlib.sha256(identity.encode()).hexdigest()[:16]  # of the training text, tokenized
        self.config, self.batch, self.seed, self.num_steps = config, batch, seed, num_steps
        self.train_samples = make_dataset(prepared, "train", config, seed)
        self.validation_samples = make_dataset(prepared, "validation", config, seed)
        available = len(self.validation_samples)
        if num_validation_samples is not None and num_validation_samples > available:
            raise ValueError(
                f"`trainer.num_validation_samples` must be at most the validation part's {available} sequences of "
                f"{config.seq_length} tokens, but is {num_validation_samples}"
            )
        self.num_validation_samples = num_validation_samples or available
        self.completed_steps = 0

    def train_dataloader(self) -> DataLoader:
        """Steps from `completed_steps` on."""
        parallel = self.trainer.strategy.parallel
        sampler = self.sampler(parallel.dp_rank, parallel.dp_size, self.completed_steps)
        collate = _MicroBatches(self.batch.micro_batch_size)
        return self._loader(self.train_samples, batch_sampler=sampler, collate_fn=collate)

    def sampler(self, dp_rank: int = 0, dp_size: int = 1, start_step: int = 0) -> GlobalBatchSampler:
        """The order of the training samples, as one data rank meets it."""
        size, count = self.batch.global_batch_size, len(self.train_samples)
        return GlobalBatchSampler(count, size, dp_rank, dp_size, self.seed, self.num_steps, start_step)

    def val_dataloader(self) -> DataLoader:
        """This data rank's validation sequences; the last micro-batch may be smaller."""
        parallel = self.trainer.strategy.parallel
        borders = [self.num_validation_samples * r // parallel.dp_size for r in range(parallel.dp_size + 1)]
        mine = [(i, 0, i) for i in range(borders[parallel.dp_rank], borders[parallel.dp_rank + 1])]
        size = self.batch.micro_batch_size
        batches = [mine[i : i + size] for i in range(0, len(mine), size)]
        # Lightning would skip the whole validation, its closing all-reduce included, on a rank whose loader has length
        # 0, and the other ranks would wait for ever: where some rank has nothing, no rank's loader tells its length.
        some_rank_is_idle = self.num_validation_samples < parallel.dp_size
        sampler = _Unsized(batches) if some_rank_is_idle else batches
        return self._loader(self.validation_samples, batch_sampler=sampler, collate_fn=_stack)

    def _loader(self, samples: GPTDataset | BERTDataset, **kwargs: Any) -> DataLoader:
        # A generator of its own: a loader that draws from torch's would shift the dropout of one rank against another.
        return DataLoader(
            _References(samples),
            num_workers=self.config.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(0),
            **kwargs,
        )

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


def make_dataset(prepared: PreparedCorpus, split: str, config: DataConfig, seed: int) -> GPTDataset | BERTDataset:
    """The samples of one split, of the kind the corpus was prepared for."""
    if prepared.architecture == "gpt":
        return GPTDataset(prepared, split, config.seq_length)
    return BERTDataset(prepared, split, config, seed)
