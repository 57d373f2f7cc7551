"""The Lightning module of finetuning, for all tasks: the encoder with the task's head, and its loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..config.finetune import FinetuneConfig
from ..training.step.training_module import TrainingModule
from .batches import Batch
from .heads import build_finetune_model
from .initial_checkpoint import InitialCheckpoint


class FinetuneModule(TrainingModule):
    """Finetuning of one BERT.

    The loss is the mean over the items of the global batch, however it is divided over ranks and micro-batches, also in
    the smaller last step of an epoch.

    Args:
        run: the configuration.
        start: the checkpoint.
        num_steps: of the training, for the schedule.
        progress: see `TrainingModule`.
    """

    loss_terms = ("item",)

    def __init__(
        self, run: FinetuneConfig, start: InitialCheckpoint, num_steps: int, progress: Callable[[str], None]
    ) -> None:
        drawn = ("pooler.",) if run.new_pooler else ()
        drawn += () if start.has_head else ("head.",)
        super().__init__(
            run.optimizer,
            run.schedule(num_steps),
            run.precision,
            run.seed,
            weights_from=None if run.from_scratch else Checkpoint.open(start.path),
            drawn=drawn,
            progress=progress,
        )
        self.run, self.start, self.config = run, start, start.config

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The encoder with the head of the task."""
        return build_finetune_model(self.run, self.config, self.parallel, dtype, device)

    @contextmanager
    def reading(self, checkpoint: Checkpoint) -> Iterator[Callable[[str, Tensor], None]]:
        """As any module, with the rows of an imported head in the order of the task's classes."""
        with super().reading(checkpoint) as read_into:

            def read_in_order(key: str, out: Tensor) -> None:
                read_into(key, out)
                if self.start.head_order is not None and key.partition("/")[2].startswith("head."):
                    out.copy_(out[self.start.head_order])

            yield read_in_order

    def loss_counts(self, batch: Batch) -> Tensor:
        """Items of a micro-batch, fp64 [1]."""
        return batch["weights"].sum(dim=0, keepdim=True)

    def loss_sums(self, batch: Batch, sample_keys: Tensor | None) -> Tensor:
        """Summed loss of a micro-batch's items in nats, [1]."""
        losses = self.model.item_losses(self._logits(batch, sample_keys), batch["labels"])
        return (losses * batch["weights"].to(losses.dtype)).sum(dim=0, keepdim=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The logits of a batch's items, for the callback that scores them."""
        return self._logits(batch, None)

    def _logits(self, batch: Batch, sample_keys: Tensor | None) -> Tensor:
        return self.model(batch["tokens"], batch["token_types"], batch["attention_mask"], sample_keys)
