"""The Lightning module of finetuning, for all tasks: one optimizer step per batch, every item scored once."""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint import CheckpointReader, checkpoint_name
from ..config.finetune import FinetuneConfig
from ..parallel import ParallelContext, padding_of, sample_dropout_keys, seed_rank_generator
from ..parallel.data_collectives import sum_over_data_ranks
from ..training.runtime.ending import Ending
from ..training.runtime.exit_codes import DIVERGED, DONE
from ..training.runtime.watchdog import Watchdog
from ..training.step.module import DTYPES
from ..training.step.optimizer import MixedPrecisionAdamW
from ..training.step.schedule import learning_rate_of_update
from .batches import Batch
from .features import Features
from .heads import FinetuneModel, build_finetune_model
from .initial_checkpoint import InitialCheckpoint
from .scoring import Predictions, predict_sets
from .tasks import HeadKind, benchmark_of
from .timing import Timer


class FinetuneModule(L.LightningModule):
    """Finetuning of one BERT. A Lightning batch is the list of this data rank's micro-batches of one step.

    The loss is the mean over the items of the global batch, however it is divided over ranks and micro-batches, also in
    the smaller last step of an epoch.

    Args:
        run: the configuration.
        start: the checkpoint.
        sets: features to score, by name.
        num_steps: of the whole training.
        steps_per_epoch: for the epoch of each scoring.
        run_dir: folder of scores and the checkpoint.
        watchdog: its `mark` is called with the progress.
        ending: is set when the run has diverged.

    Communicates:
        per step, the gradients over the data group (DDP; for half types in fp32, by the optimizer), and the loss if it
        is logged; per scoring, all logits to all ranks, and the metrics from rank 0.
    """

    def __init__(
        self,
        run: FinetuneConfig,
        start: InitialCheckpoint,
        sets: dict[str, Features],
        num_steps: int,
        steps_per_epoch: int,
        run_dir: Path,
        watchdog: Watchdog,
        ending: Ending,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.run, self.start, self.config = run, start, start.config
        self.sets, self.run_dir, self.watchdog, self.ending = sets, run_dir, watchdog, ending
        self.schedule, self.steps_per_epoch = run.schedule(num_steps), steps_per_epoch
        self.model: FinetuneModel | None = None
        self.completed_steps = 0
        self.scored_at = -1
        self.metrics: dict[str, float] = {}  # of the last scoring, on every rank
        self.predictions: dict[str, Predictions] = {}  # the same, on rank 0
        self.logits: dict[str, list[np.ndarray]] = {}
        self.items_trained, self.stopwatch = 0, Timer()
        self.save_problem: str | None = None  # why the checkpoint could not be written; the same on all ranks
        self._found: list[tuple[str, np.ndarray, list[np.ndarray]]] = []

    @property
    def parallel(self) -> ParallelContext:
        """This rank's place, from the strategy."""
        return self.trainer.strategy.parallel

    def configure_model(self) -> None:
        """Build this rank's shard on its device and read the weights that the checkpoint has."""
        if self.model is not None:
            return
        run, context, benchmark = self.run, self.parallel, benchmark_of(self.run.task)
        drop = self.config.hidden_dropout if run.head_dropout is None else run.head_dropout
        self.model = build_finetune_model(
            self.config,
            benchmark.head,
            benchmark.num_outputs,
            drop,
            context,
            run.seed,
            DTYPES[run.precision.dtype],
            self.trainer.strategy.root_device,
            draw_encoder=run.from_scratch,
            draw_pooler=run.new_pooler,
        )
        self._read(lambda reader, key, param: reader.read_into(key, param.detach(), context.tp_rank))

    def configure_optimizers(self) -> MixedPrecisionAdamW:
        """AdamW over the shard, with fp32 masters read from the checkpoint."""
        optimizer = MixedPrecisionAdamW(
            self.model.named_parameters(), self.run.optimizer, self.run.precision, self.parallel
        )
        masters = optimizer.fp32_masters()  # with `zero1` only of the parameters that this data rank owns

        def read(reader: CheckpointReader, key: str, _: Tensor) -> None:
            master = masters.get(key.removeprefix("model/"))
            if master is not None:
                reader.read_into(key, master, self.parallel.tp_rank)

        if masters:
            self._read(read)
        return optimizer

    def _read(self, read: Any) -> None:
        """Call `read(reader, key, parameter)` for every parameter that is read from the checkpoint."""
        if self.run.from_scratch:
            return
        drawn = ("pooler.",) if self.run.new_pooler else ()
        drawn += () if self.start.has_head else ("head.",)
        with CheckpointReader(self.start.path, padding_of(self.model)) as reader:
            for name, param in self.model.named_parameters():
                if not name.startswith(drawn):
                    self.watchdog.mark(f"reading {name}")
                    read(reader, f"model/{name}", param)

    def state_for_checkpoint(self) -> dict[str, Any]:
        """The finetuning's part of a checkpoint: the task, so that its head can be reused, and the scores."""
        return {"finetune": {"task": self.run.task.name, "metrics": _for_json(self.metrics)}}

    def training_step(self, batch: list[Batch], batch_idx: int) -> None:
        """Run one optimizer step."""
        step = self.completed_steps + 1
        started = time.perf_counter()
        wrapped = self.optimizers()
        optimizer: MixedPrecisionAdamW = wrapped.optimizer
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, micro_batch in enumerate(batch):
            last = number == len(batch) - 1
            if last:
                optimizer.start_grad_sync()
            loss += self._accumulate(micro_batch, number, step, optimizer.counters.loss_scale, last)
        lr = learning_rate_of_update(optimizer.counters.read().num_updates + 1, self.schedule, self.run.optimizer.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        self.watchdog.mark(f"step {step}, optimizer")
        optimizer.reduce_gradients()
        wrapped.step()
        self.completed_steps = step
        self.items_trained += batch[0]["step_items"]
        if step % self.run.trainer.log_every_steps == 0 or step == self.trainer.max_steps:
            row = {"train/loss": sum_over_data_ranks(loss, self.parallel).item(), "lr": lr}
            counters = optimizer.counters.read()
            row |= {"grad_norm": counters.grad_norm, "num_skipped": counters.num_skipped}
            row |= {"epoch": step / self.steps_per_epoch, "time/step_s": time.perf_counter() - started}
            for logger in self.loggers:
                logger.log_metrics(row, step)
        if optimizer.counters.known.skipped_in_a_row > self.run.trainer.max_skipped_steps:
            self.ending.stop(self.trainer, DIVERGED)

    def _accumulate(self, batch: Batch, number: int, step: int, loss_scale: Tensor | float, last: bool) -> Tensor:
        """Run forward and backward of one micro-batch; returns its part of the step's mean loss, fp64."""
        context, wrapper = self.parallel, self.trainer.strategy.model
        seed_rank_generator(self.run.seed, step, number, context.dp_rank, context.tp_rank)
        self.watchdog.mark(f"step {step}, micro-batch {number + 1}")
        logits = self._forward(batch, self._dropout_keys(batch["numbers"]))
        losses = self.model.item_losses(logits, batch["labels"])
        loss = (losses * batch["weights"].to(losses.dtype)).sum() / batch["step_items"]
        is_wrapped = isinstance(wrapper, DistributedDataParallel)
        # DDP averages over the data ranks; the parts of the global mean must be added.
        scaled = loss * (loss_scale * (context.dp_size if is_wrapped else 1))
        with wrapper.no_sync() if is_wrapped and not last else nullcontext():
            self.manual_backward(scaled)
        return loss.detach().double()

    def _forward(self, batch: Batch, keys: Tensor | None) -> Tensor:
        return self.model(batch["tokens"], batch["token_types"], batch["attention_mask"], keys)

    def _dropout_keys(self, numbers: Tensor) -> Tensor:
        """One dropout key per sequence; those of a question's choices are consecutive."""
        if self.model.kind is HeadKind.CHOICE:
            choices = self.model.num_outputs
            numbers = (numbers[:, None] * choices + torch.arange(choices, device=numbers.device)).flatten()
        return sample_dropout_keys(self.run.seed, numbers)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the logits of one batch's items."""
        self.watchdog.mark(f"scoring after step {self.completed_steps}")
        logits = self._forward(batch, None).detach().cpu().double().numpy().astype(np.float32)
        rows = list(logits)
        if self.model.kind is HeadKind.SPAN:
            rows = [row[:, :length].copy() for row, length in zip(rows, batch["lengths"], strict=True)]
        self._found.append((batch["set"], batch["items"], rows))

    def on_validation_epoch_end(self) -> None:
        """Gather all logits and score them on rank 0."""
        strategy = self.trainer.strategy
        parts = strategy.gather(self._found if self.parallel.tp_rank == 0 else [])
        self._found = []
        scores: dict[str, float] | None = {}
        if self.trainer.is_global_zero:
            self.logits = _assemble(self.sets, [part for of_rank in parts for part in of_rank])
            scores = self._score()
        scores = strategy.broadcast(scores)
        if scores is None:
            self.ending.stop(self.trainer, DIVERGED)
        self.metrics = scores or {}
        self.scored_at = self.completed_steps

    def _score(self) -> dict[str, float] | None:
        """Compute predictions and metrics of all sets; None if scores are not finite."""
        task = self.run.task
        for name, rows in self.logits.items():
            if not all(np.isfinite(row).all() for row in rows):
                print(f"error: the scores of set {name} are not finite: the training has diverged", file=sys.stderr)
                return None
        self.predictions, metrics = predict_sets(task, self.sets, self.logits, task.chosen_on())
        line = {"step": self.completed_steps, "epoch": self.completed_steps / max(1, self.steps_per_epoch)}
        with open(self.run_dir / "scores.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line | _for_json(metrics)) + "\n")
        shown = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items())
        print(f"step {self.completed_steps}: {shown}", flush=True)
        for found in self.predictions.values():
            for alarm in found.alarms:
                print(f"WARNING: {alarm}", flush=True)
        return metrics

    def on_train_start(self) -> None:
        """Start measuring the training time."""
        self.stopwatch.start()

    def on_validation_start(self) -> None:
        """Stop measuring: scoring is not training time."""
        self.stopwatch.stop()

    def on_validation_end(self) -> None:
        """Measure again if training continues."""
        if self.trainer.state.fn == "fit":
            self.stopwatch.start()

    def on_train_end(self) -> None:
        """Write the checkpoint if `trainer.save` is set and the run has not diverged.

        A failure is kept in `save_problem`: it must not discard the scores.
        """
        self.stopwatch.stop()
        if not self.run.trainer.save or self.ending.exit_code != DONE:
            return
        self.watchdog.mark("saving")
        strategy = self.trainer.strategy
        path = self.run_dir / "checkpoints" / checkpoint_name(self.completed_steps)
        strategy.begin_save(path, self.run.to_dict(), self.state_for_checkpoint())
        self.save_problem = strategy.finish_save()


def _assemble(
    sets: dict[str, Features], parts: list[tuple[str, np.ndarray, list[np.ndarray]]]
) -> dict[str, list[np.ndarray]]:
    """Logits of every item of every set, in the order of the set."""
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in sets}
    for name, items, rows in parts:
        for item, row in zip(items.tolist(), rows, strict=True):
            assert item not in found[name], f"item {item} of {name} was scored twice"
            found[name][item] = row
    for name, features in sets.items():
        assert len(found[name]) == len(features), f"{len(features) - len(found[name])} items of {name} were not scored"
    return {name: [found[name][item] for item in range(len(found[name]))] for name in sets}


def _for_json(metrics: dict[str, float]) -> dict[str, float | str]:
    return {name: value if np.isfinite(value) else str(value) for name, value in metrics.items()}
