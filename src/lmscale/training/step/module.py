"""The Lightning module that both models share: one batch is one optimizer step."""

import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...checkpoint import CheckpointReader
from ...config import TransformerConfig
from ...config.pretrain import RunConfig
from ...data.certificate import digest_of_samples, digest_text
from ...kernels import PLAIN, Kernels
from ...models import build_model
from ...parallel import ParallelContext, sample_dropout_keys, seed_rank_generator
from ...parallel.collectives import sum_over_data_ranks
from ...planner.flops import model_flops_per_step
from ..runtime.exit_codes import DIVERGED, DONE
from ..runtime.watchdog import Watchdog
from .diagnosis import FirstNonFiniteOutput, parameters_that_are_not_finite
from .optimizer import MixedPrecisionAdamW
from .schedule import learning_rate_of_update
from .timing import PhaseTimer, memory_in_use

# Of weights and activations; fp8 is a way to multiply bf16 numbers (`Kernels.float8`).
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = torch.bfloat16


class PretrainModule(L.LightningModule, ABC):
    """Pretraining of one model; subclasses say what the loss terms of a micro-batch are.

    A Lightning batch is the list of this data rank's micro-batches of one optimizer step, so Lightning's step, ours
    and the data order's are one number. The loss of a term is its sum over all scored positions of the *global* batch
    divided by their number; since the numbers are known from the labels, each micro-batch is divided by them before its
    backward pass, and any cut of the batch over ranks and micro-batches gives the same gradient.

    Args:
        config: the model, with its vocabulary known.
        run: everything else.
        watchdog: is told where the training is.
        peak_flops_per_s: dense peak of one device at the run's precision, for MFU; None where unknown.
        weights_from: a checkpoint whose weights the model starts with; None draws them from the seed.
        kernels: what computes the layers.

    Communicates:
        a step, over the data group: one all-reduce of the term counts; the gradients, from within the last backward
        pass on (an all-reduce by DDP, or of half types in fp32 by the optimizer; with `zero1` reduces to their owners,
        and broadcasts of the updated weights); one all-reduce of the reported loss.
    """

    loss_terms: tuple[str, ...] = ()

    def __init__(
        self,
        config: TransformerConfig,
        run: RunConfig,
        watchdog: Watchdog,
        peak_flops_per_s: float | None = None,
        weights_from: str | None = None,
        kernels: Kernels = PLAIN,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.run = run
        self.watchdog = watchdog
        self.weights_from = weights_from
        self.kernels = kernels
        self.peak_flops_per_s = peak_flops_per_s
        self.flops_per_step = model_flops_per_step(config, run.data.seq_length, run.global_batch_size)
        self.model: torch.nn.Module | None = None
        self.completed_steps = 0
        self.exit_code = DONE
        self.data_digest = torch.zeros((), dtype=torch.int64)  # of this data rank's samples; see data/certificate.py
        self.metrics: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        self.validated_at = -1
        self._validation_sums: Tensor | None = None
        self._step_end: float | None = None
        self._steps_since_report = 0

    @property
    def parallel(self) -> ParallelContext:
        """This rank's place, from the strategy."""
        return self.trainer.strategy.parallel

    @abstractmethod
    def count_terms(self, batch: dict[str, Tensor]) -> Tensor:
        """Scored positions of each loss term in a micro-batch, fp64 [number of terms]; needs no model."""

    @abstractmethod
    def sum_terms(self, batch: dict[str, Tensor], sample_keys: Tensor | None) -> Tensor:
        """Summed loss of each term over a micro-batch in nats, [number of terms], from a forward pass."""

    def configure_model(self) -> None:
        """Build this rank's shard, on its device, once the groups exist."""
        if self.model is not None:
            return
        device = self.trainer.strategy.root_device
        dtype = DTYPES[self.run.precision.dtype]
        seed = None if self.weights_from else self.run.seed
        self.model = build_model(
            self.config, self.parallel, seed=seed, dtype=dtype, device=device, kernels=self.kernels
        )
        if self.weights_from:
            with CheckpointReader(self.weights_from) as reader:
                for name, param in self.model.named_parameters():
                    self.watchdog.mark(f"reading {name}")
                    reader.read_into(f"model/{name}", param.detach(), self.parallel.tp_rank)
        self.timer = PhaseTimer(device)

    def configure_optimizers(self) -> MixedPrecisionAdamW:
        """AdamW over the shard, its masters as exact as the weights' source."""
        optimizer = MixedPrecisionAdamW(
            self.model.named_parameters(), self.run.optimizer, self.run.precision, self.parallel
        )
        if self.weights_from:
            with CheckpointReader(self.weights_from) as reader:
                optimizer.load_masters(lambda key, out: reader.read_into(key, out, self.parallel.tp_rank))
        return optimizer

    def state_for_checkpoint(self) -> dict[str, Any]:
        """What goes on besides weights and optimizer: the data's certificate and the validation of this step.

        Communicates:
            one all-reduce of a number over the data group.
        """
        digest = sum_over_data_ranks(self.data_digest.clone(), self.parallel)
        corpus_hash = self.trainer.datamodule.corpus_hash
        state: dict[str, Any] = {"data_digest": digest_text(int(digest)), "corpus_hash": corpus_hash}
        if self.validated_at == self.completed_steps:
            state["validation"] = self.validation
        return state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the counts. The data ranks together hold the digest of all samples; the first begins with it."""
        self.completed_steps = checkpoint["lmscale"]["step"]
        if self.parallel.dp_rank == 0:
            self.data_digest = torch.tensor(checkpoint["lmscale"]["data_digest"], device=self.device)

    def stop(self, exit_code: int) -> None:
        """End the training after this step, on every rank; Lightning's own `should_stop` would validate once more."""
        self.exit_code = exit_code
        self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def training_step(self, batch: list[dict[str, Tensor]], batch_idx: int) -> None:
        """One optimizer step: every micro-batch forward and backward, then the update."""
        step = self.completed_steps + 1
        wrapped = self.optimizers()
        optimizer: MixedPrecisionAdamW = wrapped.optimizer
        optimizer.zero_grad()
        self._update_data_digest(batch)
        self.watchdog.mark(f"step {step}, count of the loss terms")
        denominators = self._denominators(batch)
        reported = torch.zeros(len(self.loss_terms), dtype=torch.float64, device=self.device)
        for micro_step, micro_batch in enumerate(batch):
            last = micro_step == len(batch) - 1
            if last:
                optimizer.start_grad_sync()
            reported += self._accumulate(micro_batch, micro_step, step, denominators, optimizer.loss_scale.value, last)
        lr = learning_rate_of_update(optimizer.num_updates + 1, self.run.schedule, self.run.optimizer.lr)
        optimizer.set_learning_rate(lr)
        self.watchdog.mark(f"step {step}, sum of the gradients over the data ranks")
        with self.timer.phase("backward"):
            optimizer.reduce_gradients()
        optimizer.measures_layers = self.run.logger.layer_grad_norms and self._reports(step)
        self.watchdog.mark(f"step {step}, optimizer")
        with self.timer.phase("optimizer"):
            wrapped.step()
        self.completed_steps = self.trainer.datamodule.completed_steps = step
        self._steps_since_report += 1
        if self._reports(step):
            self._report(step, reported, lr, optimizer)
        else:
            self.timer.add("step", time.perf_counter() - self._step_start)
        if optimizer.skipped_in_a_row > self.run.trainer.max_skipped_steps:
            self.diagnosis = self._diagnose(batch)
            self.stop(DIVERGED)

    def _reports(self, step: int) -> bool:
        """Whether the step has a row of figures; one that is validated does, for the validation's figures to join."""
        end = self.trainer.max_steps
        intervals = (self.run.logger.log_every_steps, self.run.trainer.validate_every_steps or end, end)
        return any(step % interval == 0 for interval in intervals)

    def _update_data_digest(self, batch: list[dict[str, Tensor]]) -> None:
        """Add this step's samples to the data-order certificate."""
        self.data_digest = self.data_digest.to(self.device)
        for micro_batch in batch:
            self.data_digest += digest_of_samples(micro_batch["sample_numbers"], micro_batch["sample_indices"])

    def _diagnose(self, batch: list[dict[str, Tensor]]) -> dict[str, Any]:
        """What is not finite on this rank: weights, gradients, and where it first shows in a forward pass."""
        gradients = self.optimizers().optimizer.gradients()
        report: dict[str, Any] = parameters_that_are_not_finite(self.model, gradients)
        with torch.no_grad(), FirstNonFiniteOutput(self.model) as watched:
            for micro_batch in batch:
                if watched.name is None:
                    self.sum_terms(micro_batch, self._dropout_keys(micro_batch))
        return report | {"forward": watched.name, "tp_rank": self.parallel.tp_rank, "dp_rank": self.parallel.dp_rank}

    def _denominators(self, batch: list[dict[str, Tensor]]) -> list[Tensor]:
        """What each micro-batch's term sums are divided by, so that the parts add up to the reported loss."""
        counts = [self.count_terms(micro_batch) for micro_batch in batch]
        if self.run.loss_reduction == "mean_of_means":
            parts = len(batch) * self.parallel.dp_size
            return [count.clamp(min=1) * parts for count in counts]
        total = sum_over_data_ranks(torch.stack(counts).sum(dim=0), self.parallel)
        return [total.clamp(min=1)] * len(batch)

    def _accumulate(
        self,
        batch: dict[str, Tensor],
        micro_step: int,
        step: int,
        denominators: list[Tensor],
        loss_scale: float,
        last: bool,
    ) -> Tensor:
        """Forward and backward of one micro-batch; returns its part of the loss terms, fp64 [number of terms]."""
        context = self.parallel
        seed_rank_generator(self.run.seed, step, micro_step, self._dropout_rank, context.tp_rank)
        keys = self._dropout_keys(batch)
        self.watchdog.mark(f"step {step}, forward pass of micro-batch {micro_step + 1}")
        with self.timer.phase("forward"):
            sums = self.sum_terms(batch, keys)
            terms = sums / denominators[micro_step].to(sums.dtype)
            wrapper = self.trainer.strategy.model
            # DDP averages over the data ranks; the denominators are global, so the parts must be added.
            averaged_over = context.dp_size if isinstance(wrapper, DistributedDataParallel) else 1
            loss = terms.sum() * (loss_scale * averaged_over)
        self.watchdog.mark(f"step {step}, backward pass of micro-batch {micro_step + 1}")
        accumulating = not last and isinstance(wrapper, DistributedDataParallel)
        with self.timer.phase("backward"), wrapper.no_sync() if accumulating else nullcontext():
            self.manual_backward(loss)
        return terms.detach().double()

    @property
    def _dropout_rank(self) -> int:
        """The data rank whose dropout this one draws: its own, or with shared seeds the first."""
        return 0 if self.run.dropout_seeds == "shared" else self.parallel.dp_rank

    def _dropout_keys(self, batch: dict[str, Tensor]) -> Tensor:
        """A key for each sample, or with shared seeds for the sample at the same place of the first data rank."""
        share = self.run.global_batch_size // self.parallel.dp_size
        ahead = (self.parallel.dp_rank - self._dropout_rank) * share
        return sample_dropout_keys(self.run.seed, batch["sample_numbers"] - ahead)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one micro-batch's summed losses and counts."""
        self.watchdog.mark(f"validation after step {self.completed_steps}")
        sums = torch.stack([self.sum_terms(batch, None).double(), self.count_terms(batch)])
        self._validation_sums = sums if self._validation_sums is None else self._validation_sums + sums

    def on_validation_epoch_end(self) -> None:
        """Losses over every validation sequence, each counted once over the data ranks."""
        sums = self._validation_sums
        if sums is None:  # a data rank with no sequence of its own
            sums = torch.zeros(2, len(self.loss_terms), dtype=torch.float64, device=self.device)
        sums, counts = sum_over_data_ranks(sums, self.parallel).tolist()
        means = [s / max(c, 1.0) for s, c in zip(sums, counts, strict=True)]
        self._validation_sums = None
        self.validated_at = self.completed_steps
        perplexity = torch.tensor(means[0], dtype=torch.float64).exp().item()  # inf where math.exp would raise
        self.validation = {"val/loss": sum(means), "val/perplexity": perplexity}
        if len(means) > 1:
            self.validation |= {f"val/{name}_loss": mean for name, mean in zip(self.loss_terms, means, strict=True)}
        for logger in self.loggers:
            logger.log_metrics(self.validation, self.completed_steps)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The time since the last step's end was spent fetching data."""
        now = time.perf_counter()
        if self._step_end is not None:
            self.timer.add("data", now - self._step_end)
        self._step_start = self._step_end or now

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fetching starts here."""
        self.watchdog.mark(f"data for step {self.completed_steps + 1}")
        self._step_end = time.perf_counter()

    def on_validation_end(self) -> None:
        """Validation is not part of any step's time."""
        self._step_end = time.perf_counter()

    def _report(self, step: int, terms: Tensor, lr: float, optimizer: MixedPrecisionAdamW) -> None:
        """Gather the step's figures and hand them to the loggers and the bar; times are means since the last report."""
        losses = sum_over_data_ranks(terms, self.parallel).tolist()
        self.timer.add("step", time.perf_counter() - self._step_start)
        seconds = {name: total / self._steps_since_report for name, total in self.timer.read().items()}
        self._steps_since_report = 0
        step_time_s = seconds["step"]
        tokens = self.run.global_batch_size * self.run.data.seq_length
        devices = self.parallel.tp_size * self.parallel.dp_size
        flops_per_s = self.flops_per_step / step_time_s / devices
        metrics = {"train/loss": sum(losses)}
        if len(losses) > 1:
            metrics |= {f"train/{name}_loss": loss for name, loss in zip(self.loss_terms, losses, strict=True)}
        metrics |= {
            "lr": lr,
            "grad_norm": optimizer.grad_norm,
            **{f"grad_norm/{part}": norm for part, norm in optimizer.layer_grad_norms.items()},
            "loss_scale": optimizer.loss_scale.value,
            "num_skipped": optimizer.num_skipped,
            "tokens_per_s": tokens / step_time_s,
            "tflops_per_s_per_device": flops_per_s / 1e12,
        }
        if self.peak_flops_per_s is not None:
            metrics["mfu"] = flops_per_s / self.peak_flops_per_s
        metrics["memory_gib"] = memory_in_use(self.device) / 2**30
        phases = ("step", "data", "forward", "backward", "optimizer", "checkpoint")
        metrics |= {f"time/{name}_s": seconds.get(name, 0.0) for name in phases}
        self.metrics = metrics
        for logger in self.loggers:
            logger.log_metrics(metrics, step)
