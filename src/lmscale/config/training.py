"""How a model is trained: `optimizer=`, `schedule=`, `trainer=`, `precision=`, `checkpoint=`, `resume`."""

from dataclasses import dataclass

from .checks import (
    ACCELERATORS,
    MATMUL_PRECISIONS,
    require_above_zero,
    require_fraction,
    require_not_negative,
    require_one_of,
    require_positive,
)

TRACED_UP_TO = 6  # the last step that `trainer.profiler` keeps
FORMULAS = ("paper", "megatron_v1")  # of the learning rate
DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class OptimizerConfig:
    """`optimizer=`: AdamW with the paper's groups (section 4.2): no decay on biases and LayerNorms.

    Args:
        lr: peak learning rate.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator of the update.
        weight_decay: decoupled weight decay.
        max_grad_norm: gradients are clipped to this global norm; None: no clipping.
        moments: `fp32` (fp64 for fp64 weights), or `bf16`: half the bytes, rounded stochastically after every update.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    moments: str = "fp32"

    def __post_init__(self) -> None:
        require_not_negative(self, "lr", "weight_decay")
        require_fraction(self, "beta1", "beta2")
        require_above_zero(self, "eps", *([] if self.max_grad_norm is None else ["max_grad_norm"]))
        require_one_of(self, "moments", ("fp32", "bf16"))


@dataclass(frozen=True)
class ScheduleConfig:
    """`schedule=`: warm-up and decay of the learning rate; see `training/step/learning_rate.py`.

    Args:
        decay: `cosine`, `linear` or `constant`.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer step at which the decay ends.
        min_lr: learning rate at the end of the decay.
        formula: `paper`, or `megatron_v1` as in the released code, whose first update has rate 0.
    """

    decay: str
    warmup_steps: int
    decay_steps: int
    min_lr: float = 0.0
    formula: str = "paper"

    def __post_init__(self) -> None:
        require_one_of(self, "decay", ("cosine", "linear", "constant"))
        require_one_of(self, "formula", FORMULAS)
        require_positive(self, "decay_steps")
        # A warm-up longer than the run is allowed: a short trial of a long recipe never leaves it.
        require_not_negative(self, "warmup_steps", "min_lr")
        if self.formula == "megatron_v1" and 2 * self.warmup_steps > self.decay_steps:  # it would rise above the peak
            raise ValueError(
                f"`schedule.warmup_steps` must be at most half of `schedule.decay_steps` ({self.decay_steps}) with "
                f"formula megatron_v1, but is {self.warmup_steps}"
            )

    def check_peak(self, lr: float) -> None:
        """Refuse a floor above the peak.

        Raises:
            ValueError: `min_lr` is above `lr`.
        """
        if self.min_lr > lr:
            raise ValueError(f"`schedule.min_lr` must be at most `optimizer.lr` ({lr}), but is {self.min_lr}")


@dataclass(frozen=True)
class TrainerConfig:
    """`trainer=`: how long to train, and how often to validate (optimizer steps; sequences).

    Args:
        max_steps: length of the run, and by default of the schedule.
        stop_after_steps: stop cleanly, with a checkpoint, once this many steps of the run are done; None: max_steps.
        validate_every_steps: 0 validates only at the start and the end.
        num_validation_samples: sequences scored each time, always the same; None: all.
        accelerator: `auto` (a GPU if there is one), `cpu` or `gpu`.
        max_skipped_steps: steps in a row that may be skipped for a gradient that is not finite, before the run stops
            with a diagnosis; those after which fp16's loss scale halves are not counted.
        check_replicas_every_steps: how often the ranks compare hashes of tensors that must be equal; 0: never.
        num_threads: CPU threads per rank, at most the machine's cores; None: OMP_NUM_THREADS if it is set, else
            srun's `--cpus-per-task`, else the cores over the local ranks.
        matmul_precision: fp32 matrix products, `highest`, `high` or `medium` (torch.set_float32_matmul_precision);
            a GPU may use TF32 unless it is `highest`, and with `medium` a CPU with AMX may round the factors to bf16.
        profiler: `torch` writes a trace of the 4th to 6th step of a start into the run folder's `profile`, from the
            tensor ranks of data rank 0; None: no profile.
        progress_bar: show the progress in one line, rewritten on a terminal, and a new one every 100 steps elsewhere.
    """

    max_steps: int
    stop_after_steps: int | None = None
    validate_every_steps: int = 0
    num_validation_samples: int | None = None
    max_skipped_steps: int = 10
    check_replicas_every_steps: int = 100
    accelerator: str = "auto"
    num_threads: int | None = None
    matmul_precision: str = "high"
    profiler: str | None = None
    progress_bar: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_steps")
        for name in ("stop_after_steps", "num_validation_samples", "num_threads"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        if self.profiler not in (None, "torch"):
            raise ValueError(f"`trainer.profiler` must be torch or null, but is {self.profiler!r}")
        length = "max_steps" if self.stop_after_steps is None else "stop_after_steps"
        if self.profiler is not None and getattr(self, length) < TRACED_UP_TO:
            raise ValueError(
                f"`trainer.{length}` must be at least {TRACED_UP_TO} with `trainer.profiler`, "
                f"but is {getattr(self, length)}"
            )
        if self.stop_after_steps is not None and self.stop_after_steps > self.max_steps:
            raise ValueError(
                f"`trainer.stop_after_steps` must be at most `trainer.max_steps` ({self.max_steps}), "
                f"but is {self.stop_after_steps}"
            )
        require_not_negative(self, "validate_every_steps", "max_skipped_steps", "check_replicas_every_steps")
        require_one_of(self, "accelerator", ACCELERATORS)
        require_one_of(self, "matmul_precision", MATMUL_PRECISIONS)


def require_moments_fit(moments: str, dtype: str) -> None:
    """Refuse moments in bf16 with weights in fp64, whose update is not in fp32.

    Raises:
        ValueError: naming both.
    """
    if moments == "bf16" and dtype == "fp64":
        raise ValueError("`optimizer.moments` must be fp32 with precision=fp64, but is 'bf16'")


@dataclass(frozen=True)
class PrecisionConfig:
    """`precision=`: type of weights, activations and gradients. Half types have fp32 masters in the optimizer.

    Args:
        dtype: `fp64`, `fp32`, `bf16`, `fp16`, or `fp8`: bf16, with the matrix products of the linear layers in float8;
            see `parallel/float8.py`.
        initial_loss_scale: first loss scale (section 4.2); used by fp16 only.
        loss_scale_window: steps without overflow after which the loss scale doubles.
        hysteresis: overflows after which the loss scale halves; with fp16 at most `trainer.max_skipped_steps` (or 2).
        min_loss_scale: lower bound of the loss scale.
    """

    dtype: str
    initial_loss_scale: float = 4294967296.0
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        require_one_of(self, "dtype", DTYPES)
        require_positive(self, "loss_scale_window", "hysteresis")
        if not 0 < self.min_loss_scale <= self.initial_loss_scale:
            raise ValueError(
                f"`precision.min_loss_scale` must be above 0 and at most `precision.initial_loss_scale` "
                f"({self.initial_loss_scale}), but is {self.min_loss_scale}"
            )

    def refuse_float8(self) -> None:
        """Refuse fp8 outside pretraining: batches have any length there, and float8 products need multiples of 16.

        Raises:
            ValueError: `dtype` is fp8.
        """
        if self.dtype == "fp8":
            raise ValueError(f"`precision` must be one of {', '.join(DTYPES[:-1])} outside pretraining, but is fp8")


def require_loss_scale_halves(precision: PrecisionConfig, max_skipped_steps: int) -> None:
    """Refuse a hysteresis with which fp16's loss scale hardly ever halves, and every step is skipped.

    The limit on skipped steps does not count overflows while the scale can decrease, so it would not end the run.

    Raises:
        ValueError: more overflows before the scale halves than steps in a row may be skipped.
    """
    largest = max(max_skipped_steps, PrecisionConfig.hysteresis)
    if precision.dtype == "fp16" and precision.hysteresis > largest:
        raise ValueError(
            f"`precision.hysteresis` must be at most {largest} with trainer.max_skipped_steps={max_skipped_steps}, "
            f"but is {precision.hysteresis}"
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """`checkpoint=`: when to save, what to keep, and what to do if saving fails.

    Args:
        save_every_steps: optimizer steps between checkpoints; 0: none by the number of steps.
        save_every_minutes: minutes of wall time between checkpoints; None: none by the clock.
        save_last: save one at the end of the run.
        keep_last: number of newest checkpoints kept; None: all.
        keep_best: number of checkpoints of lowest validation loss kept in addition; a new best is saved as soon as it
            is validated. None: none.
        async_ (key `async`): write in the background; training waits only for a copy to host memory.
        on_error: `continue` training if a checkpoint cannot be written (the run ends with exit code 74 unless a later
            one is), or `stop` at once.
    """

    save_every_steps: int = 0
    save_every_minutes: float | None = None
    save_last: bool = True
    keep_last: int | None = 2
    keep_best: int | None = None
    async_: bool = False
    on_error: str = "continue"

    def __post_init__(self) -> None:
        require_not_negative(self, "save_every_steps")
        if self.save_every_minutes is not None:
            require_above_zero(self, "save_every_minutes")
        for name in ("keep_last", "keep_best"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        require_one_of(self, "on_error", ("continue", "stop"))


@dataclass(frozen=True)
class ResumeConfig:
    """`resume`: which checkpoint a run starts from, and with which schedule. `resume=X` is short for `resume.path=X`.

    Args:
        path: `none`, `auto` (the newest intact checkpoint of the run folder; from the start if there is none) or the
            path of a checkpoint or run folder.
        schedule: if the schedule or the peak learning rate differs from the checkpoint's: `assert` refuses, `keep` uses
            the checkpoint's, `override` uses the current one.
        weights_only: load only the weights: a new run, on any data, from step 0.
    """

    path: str = "none"
    schedule: str = "assert"
    weights_only: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "schedule", ("assert", "keep", "override"))
        if not self.path:  # as a path it would be the working directory
            raise ValueError("`resume` must be none, auto or the path of a checkpoint, but is ''")
        if self.weights_only and self.path in ("none", "auto"):
            raise ValueError(f"`resume.path` must be a checkpoint where `resume.weights_only`=true, but is {self.path}")
