"""The configuration of a zero-shot evaluation: the typed form of `conf/zero_shot.yaml`."""

from dataclasses import dataclass
from typing import Literal, Union

from .checks import Accelerator, Checked, PathText, Positive, refuse, require
from .from_dict import EntryConfig, build
from .generate import GenerateTokenizer
from .layout import Layout
from .training import PrecisionConfig


@dataclass(frozen=True)
class TaskConfig(Checked):
    """The keys of every task; `task=blimp` (minimal pairs of sentences, for a GPT or a BERT) has no others.

    Args:
        name: of the task.
        path: its file; of BLiMP the folder of its files, `UID.jsonl` or `UID.jsonl.gz`, one per paradigm.
    """

    name: str
    path: PathText


@dataclass(frozen=True)
class WikiText103Config(TaskConfig):
    """`task=wikitext103`: perplexity of the words of a WikiText file.

    Args:
        path: the published tokenized file (`wiki.test.tokens`), complete and unchanged.
        stride: targets that each window adds; the paper's overlap.
        window: tokens of the model's input.

    Source: appendix E.
    """

    stride: Positive = 32
    window: Positive = 1024

    def check_rules(self) -> None:
        if self.stride > self.window:
            # The stride may be the default.
            both = f"; set both: task.window={self.window} task.stride={max(1, self.window // 2)}"
            refuse("stride", f"at most `window` ({self.window})", self.stride, both)


@dataclass(frozen=True)
class LambadaConfig(TaskConfig):
    """`task=lambada`: accuracy on the last words of passages.

    Args:
        path: the passages, one per line.
        form: of the file, `openai` (JSON lines of written text) or `original` (lower case, tokenized).
        stop_word_filter: report also the accuracy where no stop word may be the first token of an answer.
        truncate_left: a passage longer than the model's positions loses its first tokens, and the record counts such
            passages; false: it is refused.

    Source: section 5.2.
    """

    form: Literal["openai", "original"] = "openai"
    stop_word_filter: bool = False
    truncate_left: bool = False


# The keys of each task, and the class that reads and scores it.
TASKS = {
    "wikitext103": (WikiText103Config, "lmscale.evaluation.wikitext103:WikiText103"),
    "lambada": (LambadaConfig, "lmscale.evaluation.lambada:Lambada"),
    "blimp": (TaskConfig, "lmscale.evaluation.blimp:Blimp"),
}


@dataclass(frozen=True)
class ZeroShotConfig(EntryConfig):
    """One zero-shot evaluation.

    Args:
        run_dir: Hydra's run folder, for the record.
        task: the benchmark and its file.
        ckpt: an lmscale checkpoint at any layout, a run folder (its newest one), or a folder with a Hugging Face GPT-2,
            for `task=blimp` also a BERT; None with `count_only`.
        count_only: print what would be scored, and stop.
        micro_batch_tokens: largest number of tokens of a forward pass (one window, passage or sentence may have more).
        precision: its `dtype` is that of weights and arithmetic.
        accelerator: `auto`: a GPU if there is one.

    Raises:
        ValueError: an invalid value.
    """

    run_dir: str
    task: Union[*(keys for keys, _ in TASKS.values())]
    ckpt: PathText | None = None
    count_only: bool = False
    micro_batch_tokens: Positive = 8192
    precision: PrecisionConfig = PrecisionConfig("fp32")
    accelerator: Accelerator = "auto"
    parallel: Layout = Layout()
    tokenizer: GenerateTokenizer = GenerateTokenizer()

    def check_rules(self) -> None:
        self.precision.refuse_float8()
        # Windows and passages are of any length, layers are not compiled, and there is no optimizer.
        for name in ("sequence_parallel", "batch_halves", "zero1"):
            require(self, f"parallel.{name}", "false for an evaluation", not getattr(self.parallel, name))
        self.parallel.refuse_stages()
        if self.ckpt is None and not self.count_only:
            raise ValueError("`ckpt` must be given, unless count_only=true")

    @classmethod
    def from_dict(cls, values: dict) -> "ZeroShotConfig":
        """As in `EntryConfig`; the name of the task chooses its keys.

        Raises:
            ValueError: an unknown key, a missing one or a value of a different type, with its dotted name.
        """
        task = values.get("task")
        if not isinstance(task, dict) or task.get("name") not in [*TASKS]:  # it may be a list
            refuse("task", f"one of {', '.join(TASKS)}", task)
        task = build(TASKS[task["name"]][0], task, "task.")
        return super().from_dict(values | {"task": task})
