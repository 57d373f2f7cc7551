"""A plain Lightning loop around Hugging Face's model, run one step at a time."""

import queue
import threading
from collections.abc import Iterator

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from analysis.benchmarks.config import BenchConfig

from .contender import MAX_NORM, Batch, Contender
from .plain import hugging_face_model


class LightningLoop(Contender):
    """`L.Trainer.fit` in a separate thread that waits between steps.

    Uses Lightning's automatic optimization and precision plugin, without logger, checkpoints and progress bar.
    Gradients are clipped by torch in Lightning's hook, because its bf16 plugin refuses to clip with a fused optimizer.
    """

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        self.batches: queue.Queue = queue.Queue(1)
        self.losses: queue.Queue = queue.Queue(1)
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="32-true" if bench.peers_dtype == "fp32" else "bf16-mixed",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        module = _Module(bench, self.losses)
        num_steps = bench.warm_up_steps + bench.rounds * bench.steps_per_round
        loader = DataLoader(_Batches(self.batches, num_steps), batch_size=None)
        threads = torch.get_num_threads()

        def fit() -> None:
            torch.set_num_threads(threads)  # the setting is per thread
            try:
                trainer.fit(module, loader)
            except BaseException as error:  # any error must reach the waiting caller
                self.losses.put(error)

        # A daemon, so that a failing comparison does not wait for it.
        self.thread = threading.Thread(target=fit, daemon=True)
        self.thread.start()

    def step(self, batch: Batch, number: int) -> Tensor:
        self.batches.put(batch)
        found = self.losses.get()
        if isinstance(found, BaseException):
            raise found
        return found


class _Batches(IterableDataset):
    """Batches from a queue. It has a length; otherwise Lightning waits for a second batch before the first step."""

    def __init__(self, source: queue.Queue, num_batches: int) -> None:
        self.source, self.num_batches = source, num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        return (self.source.get() for _ in range(self.num_batches))


class _Module(L.LightningModule):
    def __init__(self, bench: BenchConfig, losses: queue.Queue) -> None:
        super().__init__()
        self.bench, self.losses = bench, losses
        self.model = hugging_face_model(bench)
        self.run = torch.compile(self.model) if bench.compiles else self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.bench.lr, weight_decay=0.01, fused=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.run(input_ids=batch["tokens"], labels=batch["unshifted"]).loss

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, **_: object) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)

    def on_train_batch_end(self, outputs: dict, batch: Batch, batch_idx: int) -> None:
        self.losses.put(outputs["loss"].detach())
