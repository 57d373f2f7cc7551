"""The configuration of a pretraining run: the typed form of `conf/train.yaml`.

The entry point passes the resolved configuration to `RunConfig.from_dict`, which refuses unknown keys, missing keys and
values of the wrong type before any process starts. Other code sees only these dataclasses.
"""

from dataclasses import dataclass, field

from .checks import require_not_negative, require_one_of, require_positive, require_seed
from .data import DataConfig, TokenizerConfig
from .from_dict import build, keys_of, to_plain
from .layout import BatchConfig, Layout, ParallelConfig
from .model import FLOAT8_MULTIPLE, ModelConfig, from_file, to_file
from .training import (
    CheckpointConfig,
    OptimizerConfig,
    PrecisionConfig,
    ResumeConfig,
    ScheduleConfig,
    TrainerConfig,
    require_loss_scale_halves,
    require_moments_fit,
)

FIDELITIES = ("paper", "megatron_v1", "modern")
LOSS_REDUCTIONS = ("token_mean", "mean_of_means")
DROPOUT_SEEDS = ("unique", "shared")
KERNELS = ("torch", "apex", "auto")


@dataclass(frozen=True)
class LoggerConfig:
    """`logger=`: metrics.csv is always written; TensorBoard and Weights & Biases by choice.

    Args:
        log_every_steps: optimizer steps between rows of metrics.csv.
        layer_grad_norms: also report the gradient norm of the embedding, of each layer and of the output part.
        layer_statistics: steps at which `layer_statistics.jsonl` gets the statistics of each sublayer: variance of its
            branch, the share that does not depend on the input, gradient norm and attention entropy; see
            `training/callbacks/layer_statistics.py`. Each costs one forward pass. [] is none.
        tensorboard: write TensorBoard events.
        wandb: log to Weights & Biases; needs the wandb package.
        project: name of the project on Weights & Biases.
    """

    log_every_steps: int = 1
    layer_grad_norms: bool = False
    layer_statistics: list = field(default_factory=list)
    tensorboard: bool = True
    wandb: bool = False
    project: str = "lmscale"

    def __post_init__(self) -> None:
        require_positive(self, "log_every_steps")
        steps = self.layer_statistics
        if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 1 for step in steps):
            raise ValueError(f"`layer_statistics` must be a list of whole numbers of at least 1, but is {steps}")


@dataclass(frozen=True)
class RunConfig:
    """One pretraining run.

    Args:
        name: short name of the run in its record.
        run_dir: Hydra's run folder, absolute.
        model: its sizes; `vocab_size` None means the tokenizer's.
        micro_batch_size: sequences per rank and forward pass.
        global_batch_size: sequences of one optimizer step, over all ranks and accumulated micro-batches.
        seed: of initial weights, sample order and dropout.
        max_restarts: how often a job restarts from its newest intact checkpoint after a rank has died; only if lmscale
            starts the ranks (torchrun has its own `--max-restarts`).
        loss_reduction: `token_mean` divides by the scored tokens of the global batch; `mean_of_means` averages the
            means of ranks and micro-batches, as Megatron-LM v1.0 did.
        dropout_seeds: with `unique` every sample has its own dropout masks; with `shared` every data rank uses those of
            the first one, as Megatron-LM v1.0 did, and the run depends on `dp_size`.
        fidelity: which source sets the points on which the paper, the released code and current practice differ; the
            run's own keys hold the values.
        deterministic: bitwise equal reruns (torch.use_deterministic_algorithms).
        compile: torch.compile, layer by layer; `auto`: on a GPU, and on a CPU in a run of at least about twenty minutes
            in fp32 or bf16, see `compiling_pays`. The record and the checkpoints have the decision, and a run
            resumed on the same kind of accelerator keeps it.
        cuda_graphs: record the compiled layers and replay them; one GPU, half types.
        kernels: of LayerNorm: `torch`, NVIDIA's `apex`, or `auto`: apex on a GPU if it is installed and nothing is
            compiled.
    """

    name: str
    run_dir: str
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig
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
    compile: bool | str = "auto"
    cuda_graphs: bool = False
    kernels: str = "torch"
    max_restarts: int = 0
    resume: ResumeConfig = ResumeConfig()
    loss_reduction: str = "token_mean"
    dropout_seeds: str = "unique"
    fidelity: str = "paper"
    overrides: list = field(default_factory=list)

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_size", "global_batch_size")
        require_one_of(self, "loss_reduction", LOSS_REDUCTIONS)
        require_one_of(self, "dropout_seeds", DROPOUT_SEEDS)
        require_one_of(self, "fidelity", FIDELITIES)
        require_one_of(self, "kernels", KERNELS)
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"`compile` must be true, false or auto, but is {self.compile!r}")
        require_not_negative(self, "max_restarts")
        if self.checkpoint.keep_best is not None and not self.trainer.validate_every_steps:
            raise ValueError(
                "`checkpoint.keep_best` must be null where `trainer.validate_every_steps` is 0, "
                f"but is {self.checkpoint.keep_best}"
            )
        require_seed(self)
        self.schedule.check_peak(self.optimizer.lr)
        require_moments_fit(self.optimizer.moments, self.precision.dtype)
        require_loss_scale_halves(self.precision, self.trainer.max_skipped_steps)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Check the sizes against each other, before `auto` sizes and the tokenizer are known."""
        positions, seq_length = self.model.max_position_embeddings, self.data.seq_length
        if seq_length > positions:
            raise ValueError(
                f"`data.seq_length` must be at most `model.max_position_embeddings` ({positions}), but is {seq_length}"
            )
        sizes = {name: getattr(self.parallel, name) for name in ("tp_size", "dp_size")}
        with keys_of(ParallelConfig, "parallel."):
            layout = self.parallel.layout(**{name: 1 if size == "auto" else size for name, size in sizes.items()})
        self.check_layout(layout)

    def check_layout(self, layout: Layout, model: ModelConfig | None = None) -> BatchConfig:
        """Check that a layout divides model and batch; returns how it divides the batch.

        Args:
            model: with the tokenizer's vocabulary, once that is known.

        Raises:
            ValueError: `tp_size` does not cut the model into equal shards, or the batch not into micro-batches.
        """
        config, tp_size = model or self.model, layout.tp_size
        with keys_of(ModelConfig, "model."), keys_of(ParallelConfig, "parallel."):
            config.check_tensor_parallel(tp_size, layout.pad_heads)
            layout.check_micro_batch(self.micro_batch_size)
            if self.precision.dtype == "fp8":
                config.check_float8(tp_size)
                multiple = FLOAT8_MULTIPLE * layout.batch_parts
                if self.micro_batch_size * self.data.seq_length % multiple:
                    raise ValueError(
                        f"`micro_batch_size` x `data.seq_length` must be a multiple of {multiple} with "
                        f"precision=fp8{' and `batch_halves`' if layout.cuts_batch else ''}, "
                        f"but is {self.micro_batch_size} x {self.data.seq_length}"
                    )
            if layout.sequence_parallel and self.data.seq_length % tp_size:
                raise ValueError(
                    f"`data.seq_length` must be a multiple of `tp_size` ({tp_size}) with `sequence_parallel`, "
                    f"but is {self.data.seq_length}"
                )
            return BatchConfig(self.micro_batch_size, self.global_batch_size, layout.dp_size)

    @classmethod
    def from_dict(cls, values: dict) -> "RunConfig":
        """Build from nested plain values; `resume` may be its `path` alone.

        Raises:
            ValueError: an unknown key, a missing key or a value of a different type, with its dotted name; sizes that
                do not fit together.
        """
        if isinstance(values.get("resume"), str):
            values = values | {"resume": {"path": values["resume"]}}
        path = (values.get("resume") or {}).get("path", "none")
        if path is None or isinstance(path, bool):  # `resume=true`
            rule = "`resume` must be none, auto or the path of a checkpoint"
            raise ValueError(f"{rule}, but is {path}; did you mean `{'auto' if path else 'none'}`?")
        if isinstance(values.get("model"), dict):
            values = values | {"model": from_file(values["model"])}
        return build(cls, values, "")

    def to_dict(self) -> dict:
        """Nested plain values, ready for JSON; `from_dict` gives an equal run back."""
        values = to_plain(self)
        return values | {"model": to_file(values["model"])}
