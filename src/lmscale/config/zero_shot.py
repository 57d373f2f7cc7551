"""The configuration of a zero-shot evaluation: the typed form of `conf/zero_shot.yaml`."""

from dataclasses import dataclass

from .checks import ACCELERATORS, require_one_of, require_path, require_positive
from .from_dict import build, to_plain
from .generate import GenerateTokenizer
from .layout import Layout
from .training import PrecisionConfig

LAMBADA_FORMS = ("openai", "original")


@dataclass(frozen=True)
class WikiText103Config:
    """`task=wikitext103`: perplexity of the words of a WikiText file.

    Args:
        name: of the task.
        path: the published tokenized file (`wiki.test.tokens`), complete and unchanged.
        stride: targets that each window adds; the paper's overlap.
        window: tokens of the model's input.

    Source: appendix E.
    """

    name: str
    path: str
    stride: int = 32
    window: int = 1024

    def __post_init__(self) -> None:
        require_positive(self, "stride", "window")
        if self.stride > self.window:
            # The stride may be the default.
            both = f"set both: task.window={self.window} task.stride={max(1, self.window // 2)}"
            raise ValueError(f"`stride` must be at most `window` ({self.window}), but is {self.stride}; {both}")


@dataclass(frozen=True)
class LambadaConfig:
    """`task=lambada`: accuracy on the last words of passages.

    Args:
        name: of the task.
        path: the passages, one per line.
        form: of the file, `openai` (JSON lines of written text) or `original` (lower case, tokenized).
        stop_word_filter: report also the accuracy where no stop word may be the first token of an answer.
        truncate_left: a passage longer than the model's positions loses its first tokens, and the record counts such
            passages; false: it is refused.

    Source: section 5.2.
    """

    name: str
    path: str
    form: str = "openai"
    stop_word_filter: bool = False
    truncate_left: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "form", LAMBADA_FORMS)


TASKS = {"wikitext103": WikiText103Config, "lambada": LambadaConfig}


@dataclass(frozen=True)
class ZeroShotConfig:
    """One zero-shot evaluation.

    Args:
        run_dir: Hydra's run folder, for the record.
        task: the benchmark and its file.
        ckpt: an lmscale checkpoint at any layout, a run folder (its newest one), or a folder with a Hugging Face GPT-2;
            None with `count_only`.
        count_only: print what would be scored, and stop.
        micro_batch_tokens: largest number of tokens of a forward pass (one window or passage may have more).
        precision: its `dtype` is that of weights and arithmetic.
        accelerator: `auto` (a GPU if there is one), `cpu` or `gpu`.

    Raises:
        ValueError: an invalid value.
    """

    run_dir: str
    task: WikiText103Config | LambadaConfig
    ckpt: str | None = None
    count_only: bool = False
    micro_batch_tokens: int = 8192
    precision: PrecisionConfig = PrecisionConfig("fp32")
    accelerator: str = "auto"
    parallel: Layout = Layout()
    tokenizer: GenerateTokenizer = GenerateTokenizer()

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch_tokens")
        self.precision.refuse_float8()
        if self.parallel.sequence_parallel:  # windows and passages are of any length
            raise ValueError("`parallel.sequence_parallel` must be false for an evaluation, but is true")
        if self.parallel.batch_halves:  # layers are not compiled
            raise ValueError("`parallel.batch_halves` must be false for an evaluation, but is true")
        if self.parallel.zero1:
            raise ValueError("`parallel.zero1` must be false for an evaluation, which has no optimizer, but is true")
        require_one_of(self, "accelerator", ACCELERATORS)
        if self.ckpt is None and not self.count_only:
            raise ValueError("`ckpt` must be given, unless count_only=true")
        if self.ckpt is not None:
            require_path(self, "ckpt")

    @classmethod
    def from_dict(cls, values: dict) -> "ZeroShotConfig":
        """Build from nested plain values; `overrides`, which the entry point adds, are not part of an evaluation.

        Raises:
            ValueError: an unknown key, a missing one or a value of a different type, with its dotted name.
        """
        values = {key: value for key, value in values.items() if key != "overrides"}
        task = values.pop("task", None)
        if not isinstance(task, dict) or task.get("name") not in TASKS:
            raise ValueError(f"`task` must be one of {', '.join(TASKS)}, but is {task!r}")
        kind = (values.get("tokenizer") or {}).get("kind")
        if kind not in (None, "gpt2"):
            raise ValueError(f"`tokenizer` must be gpt2, or left alone for the checkpoint's own, but is {kind}")
        task = build(TASKS[task["name"]], task, "task.")
        return build(cls, values | {"task": task}, "")

    def to_dict(self) -> dict:
        """Nested plain values, ready for JSON."""
        return to_plain(self)
