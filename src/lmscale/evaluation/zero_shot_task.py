"""Tasks of zero-shot evaluation: read and tokenize the file, count what is scored; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import TransformerConfig
from ..config.zero_shot import LambadaConfig, WikiText103Config
from ..data.tokenizer import Tokenizer
from ..paper import GPT_SIZES, GPT_VOCABULARY, STEPS, WIKITEXT_TEST_TARGETS, WIKITEXT_TEST_WORDS
from ..text.whole_file import TextFile, read_text_file
from .lambada import Passage, encode_passages, fit_passages, read_passages
from .wikitext import count_words, detokenize
from .windows import Windows

# T_o of the published WikiText-103 files, and the number of LAMBADA's passages; they identify complete files.
WIKITEXT_WORDS = {"test": WIKITEXT_TEST_WORDS, "validation": 217_642}
LAMBADA_PASSAGES = 5_153


@dataclass(frozen=True)
class WikiText103:
    """A WikiText file as a stream of subwords.

    Args:
        num_words: T_o of the raw text.
        tokens: the whole detokenized file, encoded as one string.
        windows: over the T = len(tokens) - 1 targets.
    """

    file_name: str
    file_sha256: str
    num_words: int
    tokens: Sequence[int]
    windows: Windows

    @property
    def split(self) -> str:
        """The published file with this T_o: `test` or `validation`, otherwise `other`."""
        return next((name for name, words in WIKITEXT_WORDS.items() if words == self.num_words), "other")

    @property
    def counts(self) -> dict[str, int]:
        """T_o, T and the windows, on which the perplexity depends."""
        windows = self.windows
        return {
            "T_o": self.num_words,
            "T": windows.num_targets,
            "windows": len(windows),
            "windows_megatron": windows.num_megatron,
            "window": windows.window,
            "stride": windows.stride,
        }

    def fit(self, max_positions: int, config: WikiText103Config) -> "WikiText103":
        """The same task, if the model has enough positions.

        Raises:
            ValueError: it has not.
        """
        if config.window > max_positions:
            raise ValueError(
                f"`task.window` must be at most the model's positions ({max_positions}), but is {config.window}"
            )
        return self


@dataclass(frozen=True)
class Lambada:
    """Tokenized passages and their last words.

    Args:
        num_truncated: passages without their first tokens, which the model could not read; None: not allowed.
    """

    file_name: str
    file_sha256: str
    form: str
    passages: Sequence[Passage]
    num_truncated: int | None = None

    @property
    def split(self) -> str:
        """`test` for a file of all 5,153 passages, otherwise `other`."""
        return "test" if len(self.passages) == LAMBADA_PASSAGES else "other"

    @property
    def counts(self) -> dict[str, int]:
        """Number of passages, of last words of several tokens, of tokens of the longest passage of the file with its
        word, and, if allowed, of truncated passages.
        """
        counts = {
            "passages": len(self.passages),
            "words_of_several_tokens": sum(len(passage.word) > 1 for passage in self.passages),
            "longest": max(p.num_dropped + len(p.context) + len(p.word) for p in self.passages),
        }
        return counts if self.num_truncated is None else counts | {"truncated": self.num_truncated}

    def fit(self, max_positions: int, config: LambadaConfig) -> "Lambada":
        """The task with passages that a model of so many positions can read; see `fit_passages`."""
        passages = fit_passages(self.passages, max_positions, self.file_name, config.truncate_left)
        num_truncated = sum(passage.num_dropped > 0 for passage in passages)
        return replace(self, passages=passages, num_truncated=num_truncated if config.truncate_left else None)


def read_task(config: WikiText103Config | LambadaConfig, tokenizer: Tokenizer) -> WikiText103 | Lambada:
    """Read and tokenize a task's file.

    Raises:
        ValueError: the file cannot be scored; see `read_text_file`, `Windows` and `read_passages`.
    """
    file = read_text_file(config.path, "task.path")
    check_complete(file)
    if isinstance(config, LambadaConfig):
        passages = encode_passages(read_passages(file, config.form), tokenizer)
        return Lambada(file.name, file.sha256, config.form, passages)
    if all(line.startswith("{") for _, line in file.lines):
        raise ValueError(f"`task.path` must be a WikiText file, but {config.path} has JSON lines, as LAMBADA's")
    tokens = tokenizer.encode_batch([detokenize(file.text)])[0]
    windows = Windows(len(tokens) - 1, config.window, config.stride)
    return WikiText103(file.name, file.sha256, count_words(file.text), tokens, windows)


def check_complete(file: TextFile) -> None:
    """Check a published file for damage that would change its counts of words and tokens, and so the number.

    Raises:
        ValueError: it has no word, or ends in the middle of a line.
    """
    if not file.text.strip():
        raise ValueError(f"`task.path` must be a file with text, but {file.name} is empty")
    if not file.text.endswith("\n"):
        line = file.text.count("\n") + 1
        raise ValueError(f"`task.path` must end with a line end, but {file.name}, line {line} is cut off")


def record_kind(task: WikiText103 | Lambada, model: TransformerConfig, step: int) -> tuple[str, str | None]:
    """Return the kind of this evaluation's record and the paper's name of the model's size.

    Returns:
        `run` if model size, steps, file and protocol are those of Table 3, otherwise `scaled_down`; and the name, None
        if the paper has no model of this size.
    """
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads)
    paper_size = next((name for name, paper in GPT_SIZES.items() if paper == shape), None)
    if isinstance(task, WikiText103):
        windows = task.windows
        as_in_paper = (windows.num_targets, windows.window, windows.stride) == (WIKITEXT_TEST_TARGETS, 1024, 32)
    else:
        as_in_paper = task.form == "openai" and not task.num_truncated  # the raw text, section 5.2
    as_in_paper = as_in_paper and model.vocab_size == GPT_VOCABULARY
    as_in_paper = as_in_paper and (model.norm_order, model.parametrization) == ("pre", "standard")
    is_run = as_in_paper and task.split == "test" and step == STEPS and paper_size is not None
    return "run" if is_run else "scaled_down", paper_size
