"""WikiText-103: word-level perplexity of a text under a GPT that reads subwords.

WikiText's files are tokenized into words (`1 @,@ 000 people , he said .`). A subword model trained on raw text should
read `1,000 people, he said.`, and its loss on that text is divided by the original number of words (section 5.2 and
appendix E; Radford et al. 2019, section 3.1).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from ..config import TransformerConfig
from ..config.checks import refuse
from ..config.zero_shot import WikiText103Config
from ..data.tokenizer import Tokenizer
from ..models import GPT
from ..paper import WIKITEXT_TEST_TARGETS, WIKITEXT_TEST_WORDS
from .scoring import last_places, score_places
from .task import Metrics, Task, perplexity, read_complete_file

# T_o of the published files, which identifies complete ones.
NUM_WORDS = {"test": WIKITEXT_TEST_WORDS, "validation": 217_642}

# (pattern, replacement), applied in this order, each to the result of the previous one. The number of subwords, and
# hence T of the paper's perplexity, depends on every rule.
_RULES = [
    ("s '", "s'"),
    *((re.escape(f" @{sign}@ "), sign) for sign in "-,."),
    *((re.escape(f" {sign} "), f"{sign} ") for sign in ":;.!?,"),
    # Spaces just inside a pair of brackets or quotes, which may span lines.
    *(
        (rf"{re.escape(first)}\s*([^{re.escape(last)}]*?)\s*{re.escape(last)}", rf"{first}\1{last}")
        for first, last in ("()", "[]", "{}", '""', "''")
    ),
    *((" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def detokenize(text: str) -> str:
    """Approximate the raw text of WikiText.

    Source: identical to NVIDIA/Megatron-LM v1.0, `tasks/zeroshot_gpt2/detokenizer.py`, on WikiText's files, on which
        the paper's T is based. (A rule there for digits after an apostrophe never matches.)
    """
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text: str) -> int:
    """Count T_o, the words of the raw text as in the paper: separated by single spaces; line ends are part of words."""
    return len(text.strip().split(" "))


@dataclass(frozen=True)
class WikiText103(Task):
    """A WikiText file as a stream of subwords; an item is a window, which advances by `stride` over the stream.

    The targets are all T tokens except the first, numbered from 0. Window 0 scores the first `window` targets, each
    with all preceding tokens as context. Window i scores the `stride` targets after those of window i - 1, each with at
    least `window - stride` tokens of context. No window extends beyond the last target.

    Args:
        num_words: T_o of the raw text.
        tokens: the whole detokenized file, encoded as one string.
        window: number of tokens the model reads at once.
        stride: number of new targets per window, at most `window`; the paper calls it overlap.

    Raises:
        ValueError: there is no target.

    Source: appendix E; NVIDIA/Megatron-LM v1.0 `tasks/zeroshot_gpt2/datasets.py` (`--overlapping-eval 32`).
    """

    detokenizer = "megatron_v1"
    num_words: int
    tokens: Sequence[int]
    window: int
    stride: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise ValueError(f"the text must have at least 2 tokens, but has {len(self.tokens)}")

    @classmethod
    def read(cls, config: WikiText103Config, tokenizer: Tokenizer) -> "WikiText103":
        file = read_complete_file(config.path)
        if all(line.startswith("{") for _, line in file.lines):
            raise ValueError(f"`task.path` must be a WikiText file, but {config.path} has JSON lines, as LAMBADA's")
        tokens, num_words = tokenizer.encode_batch([detokenize(file.text)])[0], count_words(file.text)
        split = next((name for name, words in NUM_WORDS.items() if words == num_words), "other")
        return cls(file.name, file.sha256, split, num_words, tokens, config.window, config.stride)

    def for_model(self, model: TransformerConfig) -> "WikiText103":
        if self.window > model.max_position_embeddings:
            refuse("task.window", f"at most the model's positions ({model.max_position_embeddings})", self.window)
        return self

    @property
    def follows_paper(self) -> bool:
        return (len(self.tokens) - 1, self.window, self.stride) == (WIKITEXT_TEST_TARGETS, 1024, 32)

    @property
    def counts(self) -> dict[str, int]:
        """T_o, T, and the windows that score a target; Megatron-LM has further ones, without new targets."""
        num_targets = len(self.tokens) - 1
        return {
            "T_o": self.num_words,
            "T": num_targets,
            "windows": 1 + math.ceil(max(num_targets - self.window, 0) / self.stride),
            "windows_megatron": 1 + math.ceil(max(num_targets - self.stride, 0) / self.stride),
            "window": self.window,
            "stride": self.stride,
        }

    def window_at(self, index: int) -> tuple[int, int, int]:
        """Return a window's first token, its number of input tokens, and how many of their last targets are scored."""
        first = index * self.stride
        stop = min(first + self.window, len(self.tokens) - 1)
        scored_before = 0 if index == 0 else first + self.window - self.stride
        return first, stop - first, stop - scored_before

    def batches(self, micro_batch_tokens: int) -> list[list[int]]:
        """Group consecutive windows of equal shape; only first and last windows differ in shape."""
        size, batches = max(1, micro_batch_tokens // self.window), []
        for _, group in groupby(range(self.counts["windows"]), key=lambda index: self.window_at(index)[1:]):
            indices = list(group)
            batches += [indices[start : start + size] for start in range(0, len(indices), size)]
        return batches

    def score_batch(self, model: GPT, batch: list[int]) -> Tensor:
        """Compute the loss of each window's scored targets, in nats."""
        items = []
        for first, num_read, num_scored in map(self.window_at, batch):
            stop = first + num_read
            items.append((self.tokens[first:stop], self.tokens[stop - num_scored + 1 : stop + 1]))
        losses, _, _ = score_places(model, *last_places(items))
        return losses.view(len(batch), -1).sum(dim=-1, keepdim=True)

    def nan_message(self, index: int) -> str:
        return f"the loss of every window must be a number, but that of window {index} is nan"

    def metrics(self, scores: list[list[float]]) -> Metrics:
        loss_sum, num_targets = math.fsum(loss for (loss,) in scores), len(self.tokens) - 1
        return {
            "wikitext103/perplexity": (perplexity(loss_sum, self.num_words), "exp(loss / T_o)"),
            "wikitext103/perplexity_megatron": (perplexity(loss_sum, self.num_words - 1), "exp(loss / (T_o - 1))"),
            "wikitext103/perplexity_token": (perplexity(loss_sum, num_targets), "exp(loss / T)"),
            "wikitext103/loss": (loss_sum / num_targets, "nats/token"),
        } | {f"wikitext103/{name}": (number, "count") for name, number in self.counts.items()}
