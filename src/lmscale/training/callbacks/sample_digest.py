"""The digest of the samples that a run has seen."""

from typing import Any

import lightning as L
import torch

from ...data.data_digest import digest_number, digest_of_samples


class SampleDigest(L.Callback):
    """Adds this data rank's samples to the data digest; see `data/data_digest.py`.

    Attributes:
        value: int64 [], the digest of this data rank's samples; the sum over the data ranks is that of all samples.
    """

    def __init__(self) -> None:
        self.value = torch.zeros((), dtype=torch.int64)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move to the device: a checkpoint is loaded before the module is there, and replicas are compared next."""
        self.value = self.value.to(pl_module.device)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue, on data rank 0, with the digest of all samples before."""
        if pl_module.parallel.dp_rank == 0:
            self.value = torch.tensor(digest_number(checkpoint["lmscale"]["data_digest"]))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        """Add the samples of a step."""
        for micro_batch in batch:
            self.value = self.value + digest_of_samples(micro_batch["sample_numbers"], micro_batch["sample_indices"])
