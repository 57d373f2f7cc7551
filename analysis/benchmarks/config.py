"""The typed configuration of a comparison of training steps, `conf/bench.yaml`."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from lmscale.config import TransformerConfig
from lmscale.config.checks import AboveZero, Accelerator, AtLeastZero, Checked, PathText, Positive, Seed
from lmscale.config.from_dict import build, keys_of, to_plain
from lmscale.config.model import FLOAT8_MULTIPLE, ModelConfig
from lmscale.config.training import PrecisionConfig

PADDED_VOCABULARIES = {"gpt": 51_200, "bert": 30_720}
NAMES_OF_A_MODEL_FILE = {"GPT", "GPTConfig"}
PEERS = ("hf_eager", "hf_compiled", "megatron_core", "file_eager", "file_compiled")
TEMPERATURE, TEACHER_WEIGHT = 2.0, 0.5  # of a comparison with a teacher
FILE_PEERS = {"file_eager", "file_compiled"}


@dataclass(frozen=True)
class BenchConfig(Checked):
    """One comparison.

    Args:
        model: the fields of `TransformerConfig`, and `name`; if `vocab_size` is null, the paper's padded vocabulary.
        teacher: the fields of a teacher's `TransformerConfig`, with random weights; each step then distils from it, at
            `TEMPERATURE` and `TEACHER_WEIGHT`. Peers are then those of Hugging Face.
        peers: some of `PEERS`: Hugging Face's model, eager or compiled; megatron-core's GPT
            with the local spec; a model file in nanoGPT's form (`GPT`, `GPTConfig`), eager or compiled. Empty:
            ours alone.
        precision: fp32, bf16 or fp8; with fp8 the peers compute in bf16.
        file: model file of the peers `file_eager` and `file_compiled`.
        micro_batch_size: sequences of a forward and backward pass.
        global_batch_size: sequences per step; None: one micro-batch.
        seq_length: tokens per sequence.
        compiles: compile our layers.
        cuda_graphs: record and replay our layers as CUDA graphs.
        peak_tflops_per_s: an additional peak to report shares of, besides the data sheet's.
        steps_per_round, rounds: consecutive steps per contender; number of rounds.
        warm_up_steps: untimed steps per contender; the first includes compilation.
        lr: learning rate of AdamW for all contenders.
        max_loss_difference: largest relative difference between ours and a peer's mean loss over the timed steps.
        trace: count the kernels, launches and host syncs of `steps_per_round` of our steps instead.
        record: path of the record; None writes none.
    """

    model: dict
    precision: PrecisionConfig
    micro_batch_size: Positive
    global_batch_size: Positive | None = None
    teacher: dict | None = None
    peers: list = field(default_factory=lambda: ["hf_compiled"])
    file: PathText | None = None
    seq_length: Positive | None = None
    compiles: bool = True
    cuda_graphs: bool = False
    peak_tflops_per_s: AboveZero | None = None
    steps_per_round: Positive = 3
    rounds: Positive = 5
    warm_up_steps: Positive = 2
    lr: AboveZero = 1e-4
    max_loss_difference: AtLeastZero = 0.02
    seed: Seed = 1234
    accelerator: Accelerator = "auto"
    num_threads: Positive | None = None
    trace: bool = False
    record: PathText | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_peers()
        if self.step_sequences % self.micro_batch_size:
            raise ValueError(
                f"`global_batch_size` must be a multiple of `micro_batch_size` ({self.micro_batch_size}), "
                f"but is {self.global_batch_size}"
            )
        if self.trace and self.peers:
            raise ValueError(f"`peers` must be [] with trace=true, which covers only our step, but is {self.peers!r}")
        if self.trace and self.record is None:
            raise ValueError("`record` must be a file with trace=true, but is null")
        if self.precision.dtype not in ("fp32", "bf16", "fp8"):
            raise ValueError(f"`precision` must be fp32, bf16 or fp8 for a comparison, but is {self.precision.dtype}")
        if self.teacher is not None and not {*self.peers} <= {"hf_eager", "hf_compiled"}:
            raise ValueError(f"`peers` must be hf_eager or hf_compiled with a teacher, but are {', '.join(self.peers)}")
        if self.cuda_graphs and not (self.compiles and self.precision.dtype in ("bf16", "fp8")):
            raise ValueError("`cuda_graphs` must be false unless compiles=true and precision=bf16 or fp8, but is true")
        config = self.transformer_config()
        if config.vocab_size < 2:  # transformers uses one id as padding
            raise ValueError(f"`model.vocab_size` must be at least 2, but is {config.vocab_size}")
        if self.length < 2:
            raise ValueError(f"`seq_length` must be at least 2, but is {self.length}")
        if self.cuda_graphs and config.recompute != "none":
            raise ValueError(f"`cuda_graphs` must be false with model.recompute={config.recompute}, but is true")
        if self.precision.dtype == "fp8":
            with keys_of(TransformerConfig, "model."):
                config.check_float8(tp_size=1)
            if self.micro_batch_size * self.length % FLOAT8_MULTIPLE:
                raise ValueError(
                    f"`micro_batch_size` x `seq_length` must be a multiple of {FLOAT8_MULTIPLE} with precision=fp8, "
                    f"but is {self.micro_batch_size} x {self.length}"
                )
        if config.family == "bert" and {*FILE_PEERS, "megatron_core"} & set(self.peers):
            raise ValueError(f"`peers` of a BERT must be hf_eager or hf_compiled, but are {', '.join(self.peers)}")
        if self.length > config.max_position_embeddings:
            raise ValueError(
                f"`seq_length` must be at most `model.max_position_embeddings` ({config.max_position_embeddings}), "
                f"but is {self.length}"
            )

    def _check_peers(self) -> None:
        if any(peer not in PEERS for peer in self.peers):
            raise ValueError(f"`peers` must be some of {', '.join(PEERS)}, but is {self.peers!r}")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError(f"`peers` must not contain duplicates, but is {self.peers!r}")
        if bool(FILE_PEERS & set(self.peers)) != (self.file is not None):
            raise ValueError("`file` must be given if and only if `peers` contains file_eager or file_compiled")
        if self.file is None:
            return
        if not Path(self.file).is_file():
            raise ValueError(f"`file` must be a file, but {self.file} is not")
        missing = NAMES_OF_A_MODEL_FILE - _names_in(Path(self.file))
        if missing:
            raise ValueError(
                f"`file` must define GPT and GPTConfig, but {self.file} lacks {', '.join(sorted(missing))}"
            )

    @property
    def peers_dtype(self) -> str:
        """fp32 or bf16: the type in which the peers compute. None of them supports float8."""
        return "fp32" if self.precision.dtype == "fp32" else "bf16"

    @property
    def step_sequences(self) -> int:
        """Sequences per step."""
        return self.global_batch_size or self.micro_batch_size

    @property
    def length(self) -> int:
        """Tokens of a sequence: `seq_length`, or the model's positions."""
        return self.seq_length or self.transformer_config().max_position_embeddings

    def transformer_config(self, attention: str = "sdpa", of_teacher: bool = False) -> TransformerConfig:
        """The model, or its teacher.

        Args:
            attention: in place of `model.attention=auto`.

        Raises:
            ValueError: an unknown or missing key of `model`, or an invalid value.
        """
        chosen = self.teacher if of_teacher else self.model
        values = {key: value for key, value in chosen.items() if key != "name"}
        vocab_size = PADDED_VOCABULARIES.get(values.get("family"))
        return build(ModelConfig, {"vocab_size": None} | values, "model.").resolve(vocab_size, attention)

    @classmethod
    def from_dict(cls, values: dict) -> "BenchConfig":
        """Build from nested plain values.

        Raises:
            ValueError: an unknown or missing key or an invalid value, with the dotted name.
        """
        return build(cls, {k: v for k, v in values.items() if k not in ("overrides", "run_dir")}, "")

    def to_dict(self) -> dict:
        """Nested plain values."""
        return to_plain(self)


def _names_in(path: Path) -> set[str]:
    """Names of the classes and imports in a Python file, without running it."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"`file` must be a Python file, but {path} is not: {error}") from None
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    imports = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return classes | {alias.asname or alias.name for alias in imports}
