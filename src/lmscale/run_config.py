"""What one pretraining run is asked to do: the typed form of `conf/train.yaml`.

The door hands `RunConfig.from_dict` the resolved configuration; a key that no field takes, a missing key and a value of
the wrong type are refused here, before any process starts. Below the door only these dataclasses are seen.
"""

import dataclasses
from dataclasses import dataclass, field

from .config import BatchConfig, TransformerConfig, require_positive
from .from_plain import build

LOSS_REDUCTIONS = ("token_mean", "mean_of_means")
STAND_IN_VOCAB_SIZE = 2000  # ids, for sizes that are wanted before the tokenizer is known


@dataclass(frozen=True)
class ParallelRequest:
    """`parallel=`: sizes, or `auto`. tp `auto`: the smallest power of two that fits the device and divides the model;
    dp `auto`: what is left of the world (one where lmscale starts the ranks itself on a CPU)."""

    tp_size: int | str = 1
    dp_size: int | str = "auto"
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size"):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"`parallel.{name}` must be auto or a whole number of at least 1, but is {value!r}")
        if not self.timeout_minutes > 0:
            raise ValueError(f"`parallel.timeout_minutes` must be above 0, but is {self.timeout_minutes!r}")


@dataclass(frozen=True)
class TokenizerConfig:
    """`tokenizer=`: `trained` fits one on the training text; `gpt2` and `bert` read the published files.

    Args:
        vocab_size: size to train; None takes `model.vocab_size` where that is set and below 2,000, else 2,000.
        path: for gpt2 a folder with encoder.json/vocab.bpe (or vocab.json/merges.txt), for bert a vocab.txt or its
            folder; None loads `name` from the Hugging Face hub or its cache.
    """

    kind: str
    vocab_size: int | None = None
    path: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("trained", "gpt2", "bert"):
            raise ValueError(f"`tokenizer.kind` must be one of trained, gpt2, bert, but is {self.kind!r}")
        if self.vocab_size is not None:
            require_positive(self, "vocab_size")


@dataclass(frozen=True)
class DataConfig:
    """`data=`: where documents come from and how samples are cut.

    Args:
        kind: `embedded` (Python's own documentation), `local` (a file or folder of text, JSONL or parquet) or
            `huggingface` (a dataset by name).
        path, validation_path: files for `local`; without a validation path every `validation_every`-th document is
            held out.
        name, subset, split: for `huggingface`.
        text_field: field of a JSONL line, parquet row or dataset row that holds the text.
        undecodable: `refuse` bytes that are not UTF-8, with their count, or `replace` them by U+FFFD and count them.
        seq_length: tokens of a sample.
        short_seq_probability, mask_probability, max_ngram: BERT samples (anchors: 0.1, 0.15, 3).
        cache_dir: where trained tokenizers and token files are kept; None means $LMSCALE_CACHE or ~/.cache/lmscale.
        num_workers: loader processes a rank.
    """

    kind: str
    seq_length: int
    path: str | None = None
    validation_path: str | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    undecodable: str = "refuse"
    validation_every: int = 30
    short_seq_probability: float = 0.1
    mask_probability: float = 0.15
    max_ngram: int = 3
    cache_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("embedded", "local", "huggingface"):
            raise ValueError(f"`data.kind` must be one of embedded, local, huggingface, but is {self.kind!r}")
        if self.undecodable not in ("refuse", "replace"):
            raise ValueError(f"`data.undecodable` must be one of refuse, replace, but is {self.undecodable!r}")
        require_positive(self, "seq_length", "max_ngram")
        if self.validation_every < 2:
            raise ValueError(f"`data.validation_every` must be at least 2, but is {self.validation_every}")
        if self.num_workers < 0:
            raise ValueError(f"`data.num_workers` must be at least 0, but is {self.num_workers}")
        for name in ("short_seq_probability", "mask_probability"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"`data.{name}` must be at least 0 and below 1, but is {getattr(self, name)!r}")


@dataclass(frozen=True)
class OptimizerConfig:
    """`optimizer=`: AdamW with the paper's groups (section 4.2): no decay on biases and LayerNorms."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"`optimizer.lr` must be at least 0, but is {self.lr!r}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"`optimizer.max_grad_norm` must be above 0 or null, but is {self.max_grad_norm!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`optimizer.{name}` must be at least 0 and below 1, but is {getattr(self, name)!r}")
        if not self.eps > 0:
            raise ValueError(f"`optimizer.eps` must be above 0, but is {self.eps!r}")
        if not self.weight_decay >= 0:
            raise ValueError(f"`optimizer.weight_decay` must be at least 0, but is {self.weight_decay!r}")


@dataclass(frozen=True)
class ScheduleConfig:
    """`schedule=`: warm-up and decay of the learning rate, in optimizer updates; see `training/schedule.py`."""

    decay: str
    warmup_steps: int
    decay_steps: int
    min_lr: float = 0.0
    formula: str = "paper"

    def __post_init__(self) -> None:
        if self.decay not in ("cosine", "linear", "constant"):
            raise ValueError(f"`schedule.decay` must be one of cosine, linear, constant, but is {self.decay!r}")
        if self.formula not in ("paper", "megatron_v1"):
            raise ValueError(f"`schedule.formula` must be one of paper, megatron_v1, but is {self.formula!r}")
        require_positive(self, "decay_steps")
        # Longer than the run is allowed: a short trial of a long recipe never leaves the warm-up.
        if self.warmup_steps < 0:
            raise ValueError(f"`schedule.warmup_steps` must be at least 0, but is {self.warmup_steps}")
        if not self.min_lr >= 0:
            raise ValueError(f"`schedule.min_lr` must be at least 0, but is {self.min_lr!r}")


@dataclass(frozen=True)
class TrainerConfig:
    """`trainer=`: how long, and how often the validation loss is taken (optimizer steps; sequences).

    Args:
        max_steps: length of the run, and by default of the schedule.
        stop_after_steps: stop cleanly, with a checkpoint, once this many steps of the run are done; None: max_steps.
        validate_every_steps: 0 validates only at the start and the end.
        num_validation_samples: sequences scored each time, always the same; None: all.
        accelerator: `auto` (a GPU where there is one), `cpu` or `gpu`.
        num_threads: CPU threads a rank; None shares the machine's cores between the local ranks.
        matmul_precision: fp32 matrix products, `highest`, `high` or `medium` (torch.set_float32_matmul_precision).
        progress_bar: the live bar in the terminal.
    """

    max_steps: int
    stop_after_steps: int | None = None
    validate_every_steps: int = 0
    num_validation_samples: int | None = None
    accelerator: str = "auto"
    num_threads: int | None = None
    matmul_precision: str = "medium"
    progress_bar: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_steps")
        for name in ("stop_after_steps", "num_validation_samples", "num_threads"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        if self.validate_every_steps < 0:
            raise ValueError(f"`trainer.validate_every_steps` must be at least 0, but is {self.validate_every_steps}")
        if self.accelerator not in ("auto", "cpu", "gpu"):
            raise ValueError(f"`trainer.accelerator` must be one of auto, cpu, gpu, but is {self.accelerator!r}")
        if self.matmul_precision not in ("highest", "high", "medium"):
            raise ValueError(
                f"`trainer.matmul_precision` must be one of highest, high, medium, but is {self.matmul_precision!r}"
            )


@dataclass(frozen=True)
class PrecisionConfig:
    """`precision=`: type of weights, activations and gradients. Half types keep fp32 masters in the optimizer.

    The loss scale (section 4.2) serves fp16 alone: it starts at `initial_loss_scale`, doubles after
    `loss_scale_window` clean steps and halves after `hysteresis` overflows, never below `min_loss_scale`.
    """

    dtype: str
    initial_loss_scale: float = 4294967296.0
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in ("fp64", "fp32", "bf16", "fp16"):
            raise ValueError(f"`precision.dtype` must be one of fp64, fp32, bf16, fp16, but is {self.dtype!r}")
        require_positive(self, "loss_scale_window", "hysteresis")
        if not 0 < self.min_loss_scale <= self.initial_loss_scale:
            raise ValueError(
                f"`precision.min_loss_scale` must be above 0 and at most `precision.initial_loss_scale` "
                f"({self.initial_loss_scale}), but is {self.min_loss_scale}"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """`checkpoint=`: save every so many steps (0: only at the end) and keep the newest `keep_last` (None: all)."""

    save_every_steps: int = 0
    keep_last: int | None = 2
    save_last: bool = True

    def __post_init__(self) -> None:
        if self.save_every_steps < 0:
            raise ValueError(f"`checkpoint.save_every_steps` must be at least 0, but is {self.save_every_steps}")
        if self.keep_last is not None:
            require_positive(self, "keep_last")


@dataclass(frozen=True)
class LoggerConfig:
    """`logger=`: metrics.csv is always written; TensorBoard and Weights & Biases by choice."""

    log_every_steps: int = 1
    tensorboard: bool = True
    wandb: bool = False
    project: str = "lmscale"

    def __post_init__(self) -> None:
        require_positive(self, "log_every_steps")


@dataclass(frozen=True)
class RunConfig:
    """One run. `model` stays a plain dict until the tokenizer's size is known (`model.vocab_size: null`).

    Args:
        name: short name of the run in its record.
        run_dir: Hydra's run folder, absolute.
        model: the fields of `TransformerConfig`, and `name`.
        resume: `none`, `auto` (newest complete checkpoint of `run_dir`) or the path of a checkpoint.
        loss_reduction: `token_mean` divides by the scored tokens of the global batch; `mean_of_means` averages the
            means of ranks and micro-batches, as Megatron-LM v1.0 did.
        deterministic: bitwise equal reruns (torch.use_deterministic_algorithms).
    """

    name: str
    run_dir: str
    model: dict
    data: DataConfig
    tokenizer: TokenizerConfig
    parallel: ParallelRequest
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig
    micro_batch_size: int
    global_batch_size: int
    seed: int = 1234
    deterministic: bool = False
    compile: bool = False
    resume: str = "none"
    loss_reduction: str = "token_mean"
    overrides: list = field(default_factory=list)

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size", "global_batch_size")
        if self.loss_reduction not in LOSS_REDUCTIONS:
            raise ValueError(
                f"`loss_reduction` must be one of token_mean, mean_of_means, but is {self.loss_reduction!r}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"`seed` must be at least 0 and below 2^63, but is {self.seed!r}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        """What must fit together, as far as it is known before `auto` sizes and the tokenizer are."""
        config = self.transformer_config(STAND_IN_VOCAB_SIZE)
        positions, seq_length = config.max_position_embeddings, self.data.seq_length
        if seq_length > positions:
            raise ValueError(
                f"`data.seq_length` must be at most `model.max_position_embeddings` ({positions}), but is {seq_length}"
            )
        tp_size, dp_size = self.parallel.tp_size, self.parallel.dp_size
        if tp_size != "auto":
            if self.model.get("vocab_size") is None:  # its rows are checked once they are known
                config = dataclasses.replace(config, vocab_multiple=tp_size)
            config.check_tensor_parallel(tp_size)
        BatchConfig(self.micro_batch_size, self.global_batch_size, 1 if dp_size == "auto" else dp_size)

    def transformer_config(self, tokenizer_vocab_size: int) -> TransformerConfig:
        """The model, with the tokenizer's number of ids where `model.vocab_size` is null.

        Raises:
            ValueError: an unknown key of `model`, a missing one, or a value that cannot be.
        """
        values = {key: value for key, value in self.model.items() if key != "name"}
        if values.get("vocab_size") is None:
            values["vocab_size"] = tokenizer_vocab_size
        return build(TransformerConfig, values, "model.")

    @classmethod
    def from_dict(cls, values: dict) -> "RunConfig":
        """Build from nested plain values.

        Raises:
            ValueError: an unknown key, a missing key or a value of another type, with its dotted name; sizes that do
                not fit together.
        """
        return build(cls, values, "")

    def to_dict(self) -> dict:
        """Nested plain values, ready for JSON."""
        return dataclasses.asdict(self)
