"""How a model is trained: `optimizer=`, `schedule=`, `trainer=`, `precision=`, `checkpoint=`, `resume`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .checks import AboveZero, Accelerator, AtLeastZero, Checked, Count, Fraction, PathRule, Positive, refuse, require
from .layout import ParallelConfig

TRACED_UP_TO = 6  # the last step that `trainer.profiler` keeps
RESUME_RULE = "none, auto or the path of a checkpoint"
Formula = Literal["paper", "megatron_v1"]  # of the learning rate


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """`optimizer=`: AdamW with the paper's groups (section 4.2): no decay on biases and LayerNorms.

    Args:
        lr: peak learning rate; by default the recipe's.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator of the update.
        weight_decay: decoupled weight decay.
        max_grad_norm: gradients are clipped to this global norm; None: no clipping.
        moments: type of both moments; `bf16` takes half the bytes and is rounded stochastically.
    """

    lr: AtLeastZero
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: AboveZero = 1e-8
    weight_decay: AtLeastZero = 0.01
    max_grad_norm: AboveZero | None = 1.0
    moments: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class ScheduleConfig(Checked):
    """`schedule=`: warm-up and decay of the learning rate; see `training/step/learning_rate.py`.

    Args:
        decay: form of the decay.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer step at which the decay ends; None with a constant rate only.
        cooldown_steps: optimizer steps of the decay, before which the rate is constant; None: it follows the warm-up.
        min_lr: learning rate at the end of the decay.
        formula: `megatron_v1` is that of the released code, whose first update has rate 0.
    """

    decay: Literal["cosine", "linear", "constant"]
    warmup_steps: Count = 0  # may be longer than the run: a short trial of a long recipe never leaves it
    decay_steps: Positive | None = None
    min_lr: AtLeastZero = 0.0
    formula: Formula = "paper"
    cooldown_steps: Positive | None = None

    def check_rules(self) -> None:
        if self.decay_steps is None:
            require(self, "decay_steps", f"given with decay {self.decay}", self.decay == "constant")
        for name, value in (("decay", "constant"), ("formula", "megatron_v1")):
            rule = f"null with {name} {value}"
            require(self, "cooldown_steps", rule, self.cooldown_steps is None or getattr(self, name) != value)
        if self.decay_steps is None:
            return
        rule = f"at most `decay_steps` ({self.decay_steps}) less `warmup_steps` ({self.warmup_steps})"
        fits = self.cooldown_steps is None or self.cooldown_steps <= self.decay_steps - self.warmup_steps
        require(self, "cooldown_steps", rule, fits)
        # The rate would rise above the peak.
        is_above = self.formula == "megatron_v1" and 2 * self.warmup_steps > self.decay_steps
        rule = f"at most half of `decay_steps` ({self.decay_steps}) with formula megatron_v1"
        require(self, "warmup_steps", rule, not is_above)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(Checked):
    """The keys of `trainer=` that pretraining and finetuning share.

    Args:
        accelerator: `auto`: a GPU if there is one.
        max_skipped_steps: steps in a row that may be skipped for a gradient that is not finite; those that halve fp16's
            loss scale do not count.
        num_threads: CPU threads per rank; None: OMP_NUM_THREADS, else srun's `--cpus-per-task`, else the cores over the
            local ranks.
        matmul_precision: of fp32 matrix products (torch.set_float32_matmul_precision): unless `highest`, a GPU may use
            TF32; with `medium`, a CPU may round to bf16.
    """

    max_skipped_steps: Count = 10
    accelerator: Accelerator = "auto"
    num_threads: Positive | None = None
    matmul_precision: Literal["highest", "high", "medium"] = "high"


@dataclass(frozen=True)
class TrainerConfig(TrainerOptions):
    """`trainer=`: how long to train, and how often to validate (optimizer steps; sequences).

    Args:
        max_steps: length of the run, and by default of the schedule.
        stop_after_steps: stop cleanly, with a checkpoint, once this many steps of the run are done; None: max_steps.
        validate_every_steps: 0 validates only at the start and the end.
        num_validation_samples: sequences scored each time, always the same; None: all; `auto`: as many as
            `max_validation_share` allows, or all where the corpus has fewer.
        max_validation_share: time of a validation over that of the training between two, with a forward pass as a third
            of a step; above it a run on a GPU is refused, and one on a CPU prints a warning.
        check_replicas_every_steps: how often the ranks compare hashes of tensors that must be equal; 0: never.
        profiler: `torch` writes a trace of steps 4 to 6 of a start into `profile`, from the tensor ranks of data rank
            0.
        progress_bar: show the progress in one line, on a terminal rewritten, elsewhere every 100 steps.
    """

    max_steps: Positive
    stop_after_steps: Positive | None = None
    validate_every_steps: Count = 0
    num_validation_samples: Literal["auto"] | Positive | None = "auto"
    max_validation_share: AboveZero = 0.05
    check_replicas_every_steps: Count = 100
    profiler: Literal["torch"] | None = None
    progress_bar: bool = True

    def check_rules(self) -> None:
        length = "max_steps" if self.stop_after_steps is None else "stop_after_steps"
        is_traced = self.profiler is None or getattr(self, length) >= TRACED_UP_TO
        require(self, length, f"at least {TRACED_UP_TO} with `profiler`", is_traced)
        require(self, length, f"at most `max_steps` ({self.max_steps})", getattr(self, length) <= self.max_steps)


@dataclass(frozen=True)
class PrecisionConfig(Checked):
    """`precision=`: type of weights, activations and gradients. Half types have fp32 masters in the optimizer.

    Args:
        dtype: of weights, activations and gradients; `fp8`: bf16, with the matrix products of linear layers in float8.
        initial_loss_scale: first loss scale (section 4.2); used by fp16 only.
        loss_scale_window: steps without overflow after which the loss scale doubles.
        hysteresis: overflows after which the loss scale halves.
        min_loss_scale: lower bound of the loss scale.
    """

    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
    initial_loss_scale: float = 4294967296.0
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    min_loss_scale: AboveZero = 1.0

    def check_rules(self) -> None:
        rule = f"at most `initial_loss_scale` ({self.initial_loss_scale})"
        require(self, "min_loss_scale", rule, self.min_loss_scale <= self.initial_loss_scale)

    def refuse_float8(self) -> None:
        """Refuse fp8 outside pretraining: batches have any length there, and float8 products need multiples of 16.

        Raises:
            ValueError: `dtype` is fp8.
        """
        if self.dtype == "fp8":
            refuse("precision", "one of fp64, fp32, bf16, fp16 outside pretraining", "fp8")


@dataclass(frozen=True)
class TrainingRequest(Checked):
    """The keys that a pretraining, a finetuning and the plan of a training share.

    Args:
        name: of the run in its record.
        parallel: the grid of ranks, sizes or `auto`.
        micro_batch_size: sequences per rank and forward pass.
        global_batch_size: sequences of one optimizer step, over all ranks and accumulated micro-batches.

    Raises:
        ValueError: an invalid value; moments in bf16 with weights in fp64, whose update is not in fp32; with fp16 a
            hysteresis with which the loss scale hardly ever halves, and every step is skipped.
    """

    name: str
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    trainer: TrainerOptions
    micro_batch_size: Positive
    global_batch_size: Positive

    def check_rules(self) -> None:
        precision, max_skipped_steps = self.precision, self.trainer.max_skipped_steps
        is_narrow = precision.dtype != "fp64" or self.optimizer.moments == "fp32"
        require(self, "optimizer.moments", "fp32 with precision=fp64", is_narrow)
        # The limit on skipped steps does not count overflows while the loss scale can halve.
        largest = max(max_skipped_steps, PrecisionConfig.hysteresis)
        rule = f"at most {largest} with trainer.max_skipped_steps={max_skipped_steps}"
        halves = precision.dtype != "fp16" or precision.hysteresis <= largest
        require(self, "precision.hysteresis", rule, halves)


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """`checkpoint=`: when to save, what to keep, and what to do if saving fails.

    Args:
        save_every_steps: optimizer steps between checkpoints; 0: none by the number of steps.
        save_every_minutes: minutes of wall time between checkpoints; None: none by the clock.
        save_last: save one at the end of the run.
        keep_last: number of newest checkpoints kept; None: all.
        keep_best: checkpoints of lowest validation loss kept in addition, saved as soon as validated; None: none.
        async_ (key `async`): write in the background; training waits only for a copy to host memory.
        on_error: `continue` training if a checkpoint cannot be written (exit code 74 unless a later one is), or `stop`
            at once.
    """

    save_every_steps: Count = 0
    save_every_minutes: AboveZero | None = None
    save_last: bool = True
    keep_last: Positive | None = 2
    keep_best: Positive | None = None
    async_: bool = False
    on_error: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True)
class ResumeConfig(Checked):
    """`resume`: which checkpoint a run starts from, and with which schedule. `resume=X` is short for `resume.path=X`.

    Args:
        path: `none`, `auto` (the newest intact checkpoint of the run folder, if any) or the path of a checkpoint or run
            folder.
        schedule: if schedule or optimizer differ from the checkpoint's: `assert` refuses, unless all rates so far are
            the same and the optimizer too; `keep` takes the checkpoint's, `override` the current ones.
        weights_only: load only the weights: a new run, on any data, from step 0.
    """

    path: Annotated[str, PathRule(RESUME_RULE, bool)] = "none"  # as an empty path it would be the working directory
    schedule: Literal["assert", "keep", "override"] = "assert"
    weights_only: bool = False

    def check_rules(self) -> None:
        is_weights = not (self.weights_only and self.path in ("none", "auto"))
        require(self, "path", "a checkpoint where `weights_only`=true", is_weights)
