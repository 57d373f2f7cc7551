"""LAMBADA: predict the last word of a passage from the text before it.

Source: section 5.2; "strict" in NVIDIA/Megatron-LM v1.0's `--strict-lambada` is the accuracy on whole words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import TransformerConfig
from ..config.zero_shot import LambadaConfig
from ..data.tokenizer import Tokenizer
from ..models import GPT
from ..text.documents import SURROGATE
from ..text.whole_file import TextFile, text_of_json
from .scoring import last_places, score_places
from .task import Metrics, Task, perplexity, read_complete_file

NUM_PASSAGES = 5_153  # of the published file, which identifies a complete one

# English function words. Models often predict them, but passages of LAMBADA rarely end in one (37 of 2,577 lines). The
# list is ours; Radford et al. 2019 (section 3.3) do not publish theirs.
STOP_WORDS = frozenset(
    """
    a about above across after again against all almost along already also although always am among an and another any
    anyone anything are around as at away back be because been before behind being below beneath beside between beyond
    both but by can cannot could despite did do does doing done down during each either else enough even ever every
    everyone everything few for from further had has have having he hence her here hers herself him himself his how
    however i if in inside instead into is it its itself just least less many may me might mine more most much must my
    myself near neither never no nobody none nor not nothing now of off often on once one only onto or other others
    ought our ours ourselves out outside over own perhaps quite rather really same shall she should since so some
    someone something sometimes soon still such than that the their theirs them themselves then there therefore these
    they this those though through throughout thus till to together too toward towards under unless until up upon us
    very was we were what whatever when where whether which while who whom whose why will with within without would yet
    you your yours yourself yourselves
    """.split()
)


@dataclass(frozen=True)
class Passage:
    """One item: its line number, the tokens of the context, and the tokens of the word to predict.

    Args:
        num_dropped: first tokens of the passage that the context lacks, because the model could not read them.
    """

    line: int
    context: tuple[int, ...]
    word: tuple[int, ...]
    num_dropped: int = 0

    @property
    def read(self) -> tuple[int, ...]:
        """The tokens that the model reads."""
        return self.context + self.word[:-1]


@dataclass(frozen=True)
class Answer:
    """The model's result on one passage.

    Args:
        line: line number of the passage.
        log_likelihood: log-likelihood of the whole word given the text before it, in nats (at most 0).
        right: every token of the word is the most probable one given its predecessors.
        last_token_right: the last token of the word is.
        right_filtered: as `right`, with stop words excluded as the first token.
    """

    line: int
    log_likelihood: float
    right: bool
    last_token_right: bool
    right_filtered: bool


def read_passages(file: TextFile, form: str) -> list[tuple[str, str]]:
    """Read the (passage, last word) of each line; only spaces around the passage are stripped.

    Args:
        form: `openai` (JSON lines with `text`, raw text as published by GPT-2's authors) or `original` (one passage per
            line, tokenized into words and lower-cased).

    Raises:
        ValueError: a line has a different form or fewer than two words.
    """
    found = []
    for where, line in file.lines:
        is_json = line.lstrip().startswith("{")
        if line.strip() and is_json != (form == "openai"):
            other = "openai" if is_json else "original"
            raise ValueError(f"`task.form` must match the file, but is {form}, and {where} looks like {other}")
        text = text_of_json(line, "text", '`task.path` must have {"text": ...}', where) if is_json else line
        if SURROGATE.search(text):  # JSON can escape lone surrogates
            raise ValueError(f"`task.path` must have valid Unicode on each line, but {where} has half a surrogate pair")
        words = text.rsplit(None, 1)
        if len(words) < 2:
            raise ValueError(f"`task.path` must have a passage of two words or more on each line, but {where} has none")
        found.append((words[0].strip(), words[1]))
    return found


def encode_passages(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Passage]:
    """Tokenize each passage, and its last word with a leading space.

    Source: NVIDIA/Megatron-LM v1.0, `tasks/zeroshot_gpt2/datasets.py`. Tokenizing the whole text at once gives other
        tokens for 2 of 2,577 lines of the data set.
    """
    contexts = tokenizer.encode_batch([passage for passage, _ in pairs])
    words = tokenizer.encode_batch([f" {word}" for _, word in pairs])
    items = enumerate(zip(contexts, words, strict=True), start=1)
    return [Passage(line, tuple(context), tuple(word)) for line, (context, word) in items]


def stop_word_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens that are a complete stop word with a leading space."""
    forms = [f" {form}" for word in sorted(STOP_WORDS) for form in (word, word.capitalize())]
    return sorted(ids[0] for ids in tokenizer.encode_batch(forms) if len(ids) == 1)


@dataclass(frozen=True)
class Lambada(Task):
    """Tokenized passages and their last words; an item is a passage.

    Args:
        banned: ids excluded as the first token of an answer; empty without the stop-word filter.
        num_truncated: passages without their first tokens, which the model could not read; None: not allowed.
    """

    num_scores = 4
    config: LambadaConfig
    passages: Sequence[Passage]
    banned: Sequence[int] = ()
    num_truncated: int | None = None

    @classmethod
    def read(cls, config: LambadaConfig, tokenizer: Tokenizer) -> "Lambada":
        file = read_complete_file(config.path)
        passages = encode_passages(read_passages(file, config.form), tokenizer)
        banned = stop_word_ids(tokenizer) if config.stop_word_filter else []
        split = "test" if len(passages) == NUM_PASSAGES else "other"
        return cls(file.name, file.sha256, split, config, passages, banned)

    def for_model(self, model: TransformerConfig) -> "Lambada":
        """Return the task with the passages that this model reads.

        Raises:
            ValueError: a passage is too long; the message names the first. With `truncate_left`, a word is.
        """
        max_positions, truncates, found = model.max_position_embeddings, self.config.truncate_left, []
        for passage in self.passages:
            length, where = len(passage.read), f"{self.file_name}, line {passage.line}"
            if length > max_positions and not truncates:
                raise ValueError(
                    f"a passage must be at most the model's positions ({max_positions}) long, but {where} has {length} "
                    "tokens to read; task.truncate_left=true drops the first tokens of such passages and counts them"
                )
            num_free = max_positions - len(passage.word) + 1
            if num_free < 1:
                raise ValueError(
                    f"a word must leave a position of the model's ({max_positions}) to its context, but that of "
                    f"{where} has {len(passage.word)} tokens"
                )
            context = passage.context[-num_free:]
            found.append(replace(passage, context=context, num_dropped=len(passage.context) - len(context)))
        num_truncated = sum(passage.num_dropped > 0 for passage in found)
        return replace(self, passages=found, num_truncated=num_truncated if truncates else None)

    @property
    def follows_paper(self) -> bool:
        return self.config.form == "openai" and not self.num_truncated  # the raw text, section 5.2

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

    def batches(self, micro_batch_tokens: int) -> list[list[int]]:
        """Group passages of similar length, longest first, with at most that many tokens when padded."""
        lengths, batches = [len(passage.read) for passage in self.passages], []
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            longest = lengths[batches[-1][0]] if batches else 0
            if not batches or longest * (len(batches[-1]) + 1) > micro_batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def score_batch(self, model: GPT, batch: list[int]) -> Tensor:
        """Compute the loss of each last word in nats, and how many of its tokens the model gets wrong: of all, of the
        last one, and of all with the banned ids excluded for the first.
        """
        places = last_places([(self.passages[index].read, self.passages[index].word) for index in batch])
        losses, best, allowed = score_places(model, *places, banned=self.banned)
        rows, targets = places[1].to(losses.device), places[3].to(losses.device)
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        is_last = is_first.roll(-1)
        wrong = best != targets
        wrong_filtered = torch.where(is_first, allowed, best) != targets
        numbers = torch.stack((losses, wrong.double(), (wrong & is_last).double(), wrong_filtered.double()), dim=-1)
        return torch.zeros(len(batch), 4, dtype=torch.float64, device=losses.device).index_add_(0, rows, numbers)

    def nan_message(self, index: int) -> str:
        return f"the likelihood of every word must be a number, but that of line {self.passages[index].line} is nan"

    def answers(self, scores: list[list[float]]) -> list[Answer]:
        return [
            Answer(passage.line, -loss, wrong == 0, last_wrong == 0, filtered_wrong == 0)
            for passage, (loss, wrong, last_wrong, filtered_wrong) in zip(self.passages, scores, strict=True)
        ]

    def metrics(self, scores: list[list[float]]) -> Metrics:
        name, answers = f"lambada_{self.config.form}", self.answers(scores)
        number, right = len(answers), sum(answer.right for answer in answers)
        found = {
            f"{name}/accuracy_last_word": (100 * right / number, "%"),
            f"{name}/accuracy_last_token": (100 * sum(answer.last_token_right for answer in answers) / number, "%"),
        }
        if self.config.stop_word_filter:
            right_filtered = sum(answer.right_filtered for answer in answers)
            found[f"{name}/accuracy_last_word_no_stop_words"] = (100 * right_filtered / number, "%")
        loss_sum = -sum(answer.log_likelihood for answer in answers)
        found[f"{name}/perplexity_last_word"] = (perplexity(loss_sum, number), "exp(nats/word)")
        found[f"{name}/right"] = (right, "count")
        return found | {f"{name}/{key}": (value, "count") for key, value in self.counts.items()}
