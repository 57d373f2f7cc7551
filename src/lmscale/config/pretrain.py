"""The configuration of a pretraining run: the typed form of `conf/train.yaml`.

The entry point passes the resolved configuration to `RunConfig.from_dict`, which refuses unknown keys, missing keys and
values of the wrong type before any process starts. Other code sees only these dataclasses.
"""

from dataclasses import dataclass, field
from typing import Literal

from .checks import Checked, Count, Positive, Seed, Steps, refuse, require
from .data import DataConfig, TokenizerConfig
from .from_dict import EntryConfig, keys_of
from .layout import BatchConfig, Layout, ParallelConfig
from .model import ModelConfig, from_file, require_positions, to_file
from .teacher import TeacherConfig
from .training import RESUME_RULE, CheckpointConfig, ResumeConfig, ScheduleConfig, TrainerConfig, TrainingRequest


@dataclass(frozen=True)
class LoggerConfig(Checked):
    """`logger=`: metrics.csv is always written; TensorBoard and Weights & Biases by choice.

    Args:
        log_every_steps: optimizer steps between rows of metrics.csv.
        layer_grad_norms: also report the gradient norm of the embedding, of each layer and of the output part.
        layer_statistics: steps at which each sublayer's variance, gradient norm and attention entropy go to
            `layer_statistics.jsonl`, for one forward pass each.
        tensorboard: write TensorBoard events.
        wandb: log to Weights & Biases; needs the wandb package.
        project: name of the project on Weights & Biases.
    """

    log_every_steps: Positive = 1
    layer_grad_norms: bool = False
    layer_statistics: Steps = field(default_factory=list)
    tensorboard: bool = True
    wandb: bool = False
    project: str = "lmscale"


@dataclass(frozen=True)
class RunConfig(TrainingRequest, EntryConfig):
    """One pretraining run.

    Args:
        run_dir: Hydra's run folder, absolute.
        model: its sizes; `vocab_size` None means the tokenizer's.
        seed: of initial weights, sample order and dropout.
        max_restarts: restarts from the newest intact checkpoint after a rank has died, if lmscale starts the ranks.
        loss_reduction: `token_mean` divides by the scored tokens of the global batch; `mean_of_means` averages means of
            micro-batches, as Megatron-LM v1.0 did.
        dropout_seeds: `unique`: each sample has its own dropout masks; `shared`: data ranks use the same, as in
            Megatron-LM v1.0.
        fidelity: which source sets the points on which the paper, the released code and current practice differ; the
            run's own keys hold the values.
        deterministic: bitwise equal reruns (torch.use_deterministic_algorithms).
        compile: torch.compile, layer by layer; `auto`: on a GPU, and on a CPU in runs of about twenty minutes or more.
            A resumed run keeps the decision.
        cuda_graphs: record the compiled layers and replay them; one GPU, half types.
        kernels: of LayerNorm; `auto`: apex on a GPU if it is installed and nothing is compiled.
    """

    run_dir: str
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    trainer: TrainerConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig
    seed: Seed = 1234
    deterministic: bool = False
    compile: bool | Literal["auto"] = "auto"
    cuda_graphs: bool = False
    kernels: Literal["torch", "apex", "auto"] = "torch"
    max_restarts: Count = 0
    resume: ResumeConfig = ResumeConfig()
    teacher: TeacherConfig = TeacherConfig()
    loss_reduction: Literal["token_mean", "mean_of_means"] = "token_mean"
    dropout_seeds: Literal["unique", "shared"] = "unique"
    fidelity: Literal["paper", "megatron_v1", "modern"] = "paper"
    overrides: list = field(default_factory=list)

    def check_rules(self) -> None:
        super().check_rules()
        is_scored = self.checkpoint.keep_best is None or self.trainer.validate_every_steps
        require(self, "checkpoint.keep_best", "null where `trainer.validate_every_steps` is 0", is_scored)
        rule = f"at most `optimizer.lr` ({self.optimizer.lr})"
        require(self, "schedule.min_lr", rule, self.schedule.min_lr <= self.optimizer.lr)
        ends = self.schedule.cooldown_steps is None or self.schedule.decay_steps <= self.trainer.max_steps
        rule = f"at most `trainer.max_steps` ({self.trainer.max_steps}) with `schedule.cooldown_steps`"
        require(self, "schedule.decay_steps", rule, ends)
        is_whole = self.parallel.num_stages == 1 or not self.teacher.is_given
        require(self, "parallel.pp_size", "1 with a teacher", is_whole)
        rule = "false with teacher.layers, which are the initial weights too"
        require(self, "resume.weights_only", rule, not (self.resume.weights_only and self.teacher.layers))
        require_positions(self)
        auto = {name: 1 for name in ("tp_size", "pp_size", "dp_size") if getattr(self.parallel, name) == "auto"}
        with keys_of(ParallelConfig, "parallel."):
            layout = self.parallel.layout(**auto)
        self.check_layout(layout)  # as far as it is known: arithmetic is refused before anything is read

    def check_layout(self, layout: Layout) -> BatchConfig:
        """Check that a layout divides model and batch; returns how it divides the batch.

        Raises:
            ValueError: as `Layout.divide`.
        """
        sizes = self.micro_batch_size, self.global_batch_size, self.data.seq_length
        with keys_of(ModelConfig, "model."), keys_of(ParallelConfig, "parallel."):
            return layout.divide(self.model, *sizes, self.precision.dtype)

    @classmethod
    def from_dict(cls, values: dict) -> "RunConfig":
        """Build from nested plain values; `resume` may be its `path` alone.

        Raises:
            ValueError: an unknown key, a missing key or a value of a different type, with its dotted name; sizes that
                do not fit together.
        """
        if not isinstance(resume := values.get("resume", {}), dict):
            resume = {"path": resume}
        path = resume.get("path", "none")
        if path is None or isinstance(path, bool):  # `resume=true`
            refuse("resume", RESUME_RULE, path, f"; did you mean `{'auto' if path else 'none'}`?")
        values = values | {"resume": resume}
        if isinstance(values.get("model"), dict):
            values = values | {"model": from_file(values["model"])}
        return super().from_dict(values)

    def to_dict(self) -> dict:
        """Nested plain values, ready for JSON; `from_dict` gives an equal run back."""
        values = super().to_dict()
        return values | {"model": to_file(values["model"])}
