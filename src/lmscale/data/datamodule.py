"""The Lightning data module: the training steps, and every validation sequence once."""

from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from ..config import BatchConfig
from ..config.data import DataConfig, TokenizerConfig
from ..config.family import load
from ..shared_files import check_sockets
from .loading import Loader, References, as_tensors, collate_step, end_loader_processes, ignore_signals
from .prepare import prepare_corpus
from .sampler import RunSamples

_NO_END = 1 << 40  # steps of a run whose order does not depend on its length


class PretrainDataModule(L.LightningDataModule):
    """The samples of a run, divided over the data ranks.

    A training batch is what this data rank sees in one optimizer step, its share of the global batch. Each validation
    sequence is on one data rank, in micro-batches.

    A batch is a dict of tensors. GPT: `tokens`, `labels` int64 [b, s]. BERT: also `token_types`, `attention_mask`
    [b, s] and `sop_labels` [b]. Both: `sample_numbers` int64 [b], counted over the whole run, and `sample_indices`
    int64 [b], dataset x 2^40 + index.

    Args:
        num_workers: loader processes per rank.
        by_length: sort the sequences of a step on a rank by descending length, so that most micro-batches have no
            padding. Not for `mean_of_means`, which depends on how sequences are grouped into micro-batches.
        cache: a `TeacherCache`, which adds `teacher_log_p` and `teacher_ids` to a training batch.

    Attributes:
        steps_per_epoch: steps of a Lightning epoch, here of the whole run.
    """

    def __init__(
        self, samples: RunSamples, micro_batch_size: int, num_workers: int, by_length: bool, cache: Any = None
    ) -> None:
        super().__init__()
        self.samples, self.micro_batch_size = samples, micro_batch_size
        self.num_workers, self.by_length, self.cache = num_workers, by_length, cache
        self.steps_per_epoch = samples.num_steps

    def train_dataloader(self) -> Loader:
        """The steps after the completed ones; the Trainer ends the epoch."""
        return Loader(lambda: self.step_loader(self.next_step()), self.steps_per_epoch)

    def next_step(self) -> int:
        """The step of the data that comes next, counted from 0."""
        return self.trainer.global_step

    def step_loader(self, start_step: int = 0) -> DataLoader:
        """All steps of the run from `start_step` on."""
        parallel = self.trainer.strategy.parallel
        sampler = self.samples.sampler(parallel.dp_rank, parallel.dp_size, start_step)
        collate = partial(collate_step, by_length=self.by_length)
        return self._loader(References(self.samples.train, self.cache), sampler, collate)

    def val_dataloader(self) -> Loader:
        """This data rank's validation sequences; the last micro-batch may be smaller."""
        parallel = self.trainer.strategy.parallel
        scored, size = self.samples.scored, self.micro_batch_size
        borders = [len(scored) * r // parallel.dp_size for r in range(parallel.dp_size + 1)]
        mine = scored[borders[parallel.dp_rank] : borders[parallel.dp_rank + 1]]
        batches = [mine[i : i + size] for i in range(0, len(mine), size)]
        # Lightning would skip the whole validation, its closing all-reduce included, on a rank whose loader has length
        # 0, and the other ranks would wait forever: if some rank has no sequences, no rank's loader has a length.
        some_rank_is_idle = len(scored) < parallel.dp_size
        loader = self._loader(References(self.samples.validation), batches, as_tensors)
        return Loader(lambda: loader, None if some_rank_is_idle else len(batches))

    def _loader(self, references: References, batch_sampler: Any, collate: Any) -> DataLoader:
        if self.num_workers:  # at exit Python sends them SIGTERM, which they ignore, and waits for them
            Finalize(None, end_loader_processes, exitpriority=0)
        # Its own generator: a loader that draws from torch's would make the dropout of the ranks differ.
        return DataLoader(
            references,
            batch_sampler=batch_sampler,
            collate_fn=collate,
            num_workers=self.num_workers,
            worker_init_fn=ignore_signals,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
            generator=torch.Generator().manual_seed(0),
        )

    def state_dict(self) -> dict[str, int]:
        """How many sequences make a step: with the seed and the completed steps, they are the place in the data."""
        return {"global_batch_size": self.samples.global_batch_size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Check that a step of the checkpoint has as many sequences.

        Raises:
            ValueError: a step has a different number of sequences.
        """
        saved, now = state_dict.get("global_batch_size"), self.samples.global_batch_size
        if saved not in (None, now):
            raise ValueError(f"`global_batch_size` must stay {saved}, as in the checkpoint, but is {now}")


class TextDataModule(PretrainDataModule):
    """Text for a user's own Trainer.

    A Lightning epoch is one pass over the training part; of a blend, which has no epochs, it is the whole run. `test`
    and `predict` see the validation part.

    Args:
        family: the model's, as `model.family`.
        path: a text file (see `conf/data/local.yaml`); None: the text that comes with Python.
        global_batch_size: sequences of a step, over all data ranks.
        vocab_size: of the tokenizer that is trained on the text.
        num_validation_samples: sequences scored each time; None: all.
        data, tokenizer: any other source, instead of `path`, `seq_length` and `vocab_size`.
    """

    def __init__(
        self,
        family: str,
        *,
        path: str | None = None,
        seq_length: int = 128,
        global_batch_size: int = 8,
        vocab_size: int | None = None,
        num_validation_samples: int | None = None,
        seed: int = 1234,
        data: DataConfig | None = None,
        tokenizer: TokenizerConfig | None = None,
    ) -> None:
        L.LightningDataModule.__init__(self)  # the rest is built in `setup`, once the Trainer is known
        self.family = family
        self.data = data or DataConfig(kind="local" if path else "embedded", seq_length=seq_length, path=path)
        if self.data.num_workers:
            check_sockets("data.num_workers")
        self.prepared = prepare_corpus(self.data, tokenizer or TokenizerConfig("trained", vocab_size), family, None)
        for note in self.prepared.manifest["notes"]:
            rank_zero_info(f"note: {note}")
        self.global_batch_size, self.num_wanted, self.order_seed = global_batch_size, num_validation_samples, seed

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        return self.prepared.vocab_size

    def setup(self, stage: str) -> None:
        """Divide the samples over the data ranks of the Trainer; validation has micro-batches of the module's size.

        Raises:
            ValueError: a strategy without tensor ranks, samples or ids that the model does not take, a step that the
                micro-batches of the ranks do not divide, or no end of a training whose order depends on its length.
        """
        trainer, model = self.trainer, self.trainer.lightning_module.config
        check_strategy(trainer)
        if load(model.traits.samples) is not self.prepared.make_samples:
            raise ValueError(f"`family` of the data must be the model's ({model.family}), but is {self.family}")
        if self.vocab_size > model.vocab_size:
            raise ValueError(
                f"`vocab_size` of the model must be at least the tokenizer's {self.vocab_size} ids, but is "
                f"{model.vocab_size}"
            )
        dp_size = trainer.strategy.parallel.dp_size
        micro = trainer.lightning_module.micro_batch_size or max(1, self.global_batch_size // dp_size)
        size = self.global_batch_size
        BatchConfig(micro, size, dp_size)  # checks that the ranks divide it
        (part, *others) = self.prepared.parts["train"]
        limit = trainer.max_steps if stage == "fit" else 1
        if others and limit < 0:
            raise ValueError("`max_steps` must be set for a blend of datasets, which has no epochs, but is -1")
        dataset = self.prepared.make_samples(self.prepared, "train", part, self.data, self.order_seed)
        epoch = max(1, len(dataset) // size) if not others else max(1, limit)
        steps = _NO_END
        if others or self.prepared.shuffles_documents:
            steps = limit if limit >= 0 else epoch * trainer.max_epochs
            if steps < 0:
                raise ValueError("`max_steps` or `max_epochs` must be set for shuffled documents, but both are -1")
        samples = RunSamples(self.prepared, self.data, self.order_seed, size, max(1, steps), self.num_wanted)
        super().__init__(samples, micro, self.data.num_workers, by_length=True)
        self.trainer = trainer  # which Lightning's constructor forgets
        self.steps_per_epoch = epoch

    def next_step(self) -> int:
        """As in the base class; with the Trainer's `overfit_batches` every epoch has the same first steps."""
        step, overfit = super().next_step(), self.trainer.overfit_batches
        if not overfit:
            return step
        size = overfit if isinstance(overfit, int) else int(overfit * self.steps_per_epoch)
        return step % min(size, self.steps_per_epoch)

    test_dataloader = predict_dataloader = PretrainDataModule.val_dataloader


def check_strategy(trainer: L.Trainer) -> None:
    """Raise `ValueError` for a strategy without data and tensor ranks; Lightning asks the data before the module."""
    if not hasattr(trainer.strategy, "parallel"):
        raise ValueError(f"`strategy` must be a TensorParallelStrategy, but is {type(trainer.strategy).__name__}")
