"""BLiMP: of two sentences that differ minimally, the grammatical one should be more probable.

A GPT gives the log-probability of a whole sentence after the start token (the paper's "simple LM method"). A BERT gives
the pseudo-log-likelihood, in two variants. PLL masks each token in turn and adds the log-probabilities of the true
ones. PLL-word-l2r masks also the later pieces of the token's word, because these give away its first ones.

Source: Warstadt et al. 2020 (BLiMP); Salazar et al. 2020 (PLL); Kauf and Ivanova 2023 (PLL-word-l2r).
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from ..config import TransformerConfig
from ..config.zero_shot import TaskConfig
from ..data.tokenizer import END_OF_TEXT, Tokenizer
from ..models.language_model import LanguageModel
from ..text.documents import SURROGATE
from ..text.input_files import list_files
from ..text.tables import jsonl_rows
from .scoring import last_places, score_places
from .task import Metrics, Task

NUM_PARADIGMS, NUM_PAIRS = 67, 1_000  # published, of each paradigm, which identify complete files
GROUPS = {"s-selection": "argument_structure"}  # the term of two paradigms, and the group of their published scores
SENTENCES = ("sentence_good", "sentence_bad")
_TEXTS = (*SENTENCES, "field", "linguistics_term", "UID", "pairID")


@dataclass(frozen=True)
class Pair:
    """The tokens of two sentences, and the group of their paradigm (`uid`) in the published scores."""

    uid: str
    pair_id: str
    group: str
    good: tuple[int, ...]
    bad: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The model's result on one pair.

    Args:
        score: `blimp`, or with a BERT's second variant `blimp_word_l2r`.
        good, bad: log-likelihoods of the sentences, in nats.
        right: `good` is the larger one; a tie is wrong.
    """

    score: str
    uid: str
    pair_id: str
    good: float
    bad: float
    right: bool


def read_pairs(path: str) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """Read (file and line, fields) of each pair of BLiMP's files, and the sha256 of all files' bytes, in this order.

    Raises:
        ValueError: a file or a line has a different form, or two files or two pairs have the same name.
    """
    files, pairs, digest = list_files(Path(path), "task.path"), [], hashlib.sha256()
    rule = "`task.path` must hold only BLiMP's files, UID.jsonl or UID.jsonl.gz"
    if any(reason in files.skipped for reason in ("linked folders", "other types")):
        raise ValueError(f"{rule}, but {path} has others; {files.skipped}")
    uids: dict[str, Path] = {}
    for file in files.paths:
        uid, _, ending = file.name.partition(".")
        if ending not in ("jsonl", "jsonl.gz"):
            raise ValueError(f"{rule}, but has {file}")
        if uid in uids:
            raise ValueError(f"`task.path` must hold one file per UID, but has {uids[uid]} and {file}")
        uids[uid], own, lines = file, [], {}
        for line, row in jsonl_rows(file):
            where = f"{file} {line}"
            for name in _TEXTS:
                if not isinstance(row.get(name), str) or SURROGATE.search(row[name]):  # JSON can escape lone ones
                    raise ValueError(f"`task.path` must have a valid text `{name}` in each pair, but {where} has none")
            own.append((where, row))
            for name, value in (("UID", uid), ("linguistics_term", own[0][1]["linguistics_term"])):
                if row[name] != value:
                    raise ValueError(f"`{name}` must be {value!r} in all of its file, but {where} has {row[name]!r}")
            if (first := lines.setdefault(row["pairID"], line)) != line:
                raise ValueError(f"`pairID` must occur once, but {where} has {row['pairID']!r}, as {first} does")
        if not own:
            raise ValueError(f"`task.path` must hold files with pairs, but {file} is empty")
        pairs += own
        digest.update(file.read_bytes())
    return pairs, digest.hexdigest()


def word_ends(tokens: Sequence[int], continues: Sequence[bool]) -> list[int]:
    """For each token the end of its word: the next token that does not continue one (`continues`, by id)."""
    ends = [len(tokens)]
    for place in range(len(tokens) - 1, 0, -1):
        ends.append(ends[-1] if continues[tokens[place]] else place)
    return ends[::-1]


@dataclass(frozen=True)
class Blimp(Task):
    """Minimal pairs; an item is a row that the model reads: a GPT's sentence, or a BERT's with a masked part.

    Sentences with the same tokens are scored once, and hence tie exactly.

    Args:
        sentences: file and line of the first one with these tokens.
        frame: ids around a sentence, <|endoftext|> for a GPT or [CLS], [SEP] and [MASK] for a BERT; empty as long as
            the model is not known.
    """

    needs_causal = False
    follows_paper = False  # which has no BLiMP
    pairs: Sequence[Pair]
    sentences: dict[tuple[int, ...], str]
    tokenizer: Tokenizer
    frame: tuple[int, ...] = ()

    @classmethod
    def read(cls, config: TaskConfig, tokenizer: Tokenizer) -> "Blimp":
        rows, sha256 = read_pairs(config.path)
        encoded = [*map(tuple, tokenizer.encode_batch([row[name] for _, row in rows for name in SENTENCES]))]
        sentences: dict[tuple[int, ...], str] = {}
        for number, tokens in enumerate(encoded):
            where = sentences.setdefault(tokens, rows[number // 2][0])
            if not tokens:
                raise ValueError(f"`{SENTENCES[number % 2]}` must have a token or more, but has none in {where}")
        pairs = [
            Pair(row["UID"], row["pairID"], GROUPS.get(term := row["linguistics_term"], term), good, bad)
            for (_, row), good, bad in zip(rows, encoded[::2], encoded[1::2], strict=True)
        ]
        counts = Counter(pair.uid for pair in pairs)
        split = "complete" if len(counts) == NUM_PARADIGMS and {*counts.values()} == {NUM_PAIRS} else "other"
        return cls(Path(config.path).absolute().name, sha256, split, pairs, sentences, tokenizer)

    def for_model(self, model: TransformerConfig) -> "Blimp":
        """Return the task with the rows that this model reads.

        Raises:
            ValueError: a sentence is too long, the message names the first; or the tokenizer is another family's.
        """
        marks = (END_OF_TEXT,) if model.traits.is_causal else ("[CLS]", "[SEP]", "[MASK]")
        task, limit = replace(self, frame=tuple(map(self.tokenizer.id_of, marks))), model.max_position_embeddings
        for tokens, where in self.sentences.items():
            if (length := task.num_read(tokens)) > limit:
                rule = f"a sentence must be at most the model's positions ({limit}) long"
                raise ValueError(f"{rule}, but one of {where} has {length} tokens to read")
        return task

    @property
    def counts(self) -> dict[str, int]:
        """Number of paradigms, of pairs, and of tokens of the longest sentence."""
        longest = max(map(len, self.sentences))
        return {"paradigms": len({pair.uid for pair in self.pairs}), "pairs": len(self.pairs), "longest": longest}

    @property
    def is_causal(self) -> bool:
        return len(self.frame) == 1

    def num_read(self, tokens: tuple[int, ...]) -> int:
        """Number of tokens that the model reads of a sentence and its frame; a GPT does not read the last one."""
        return len(tokens) + (0 if self.is_causal else 2)

    def spans(self, tokens: tuple[int, ...]) -> dict[str, list[tuple[int, int]]]:
        """By score, the rows that it adds: the tokens [first, stop) that a GPT predicts or a BERT has masked. A BERT
        predicts the first of them.
        """
        if self.is_causal:
            return {"blimp": [(0, len(tokens))]}
        single = [(first, first + 1) for first in range(len(tokens))]
        return {"blimp": single, "blimp_word_l2r": [*enumerate(word_ends(tokens, self.tokenizer.is_continuation))]}

    @cached_property
    def items(self) -> list[tuple[tuple[int, ...], int, int]]:
        """Sentence, first and stop of each row; where both scores of a BERT have it, once."""
        spans = {tokens: dict.fromkeys(chain(*self.spans(tokens).values())) for tokens in self.sentences}
        return [(tokens, *span) for tokens, rows in spans.items() for span in rows]

    def batches(self, micro_batch_tokens: int) -> list[list[int]]:
        """Group rows of equal length, which need no padding, longest first."""
        by_length, batches = defaultdict(list), []
        for index, (tokens, _, _) in enumerate(self.items):
            by_length[self.num_read(tokens)].append(index)
        for length, rows in sorted(by_length.items(), reverse=True):
            size = max(1, micro_batch_tokens // length)
            batches += [rows[start : start + size] for start in range(0, len(rows), size)]
        return batches

    def score_batch(self, model: LanguageModel, batch: list[int]) -> Tensor:
        """Compute the log-likelihood of each row's predicted tokens, in nats."""
        rows = [self.items[index] for index in batch]
        if self.is_causal:
            places = last_places([((*self.frame, *tokens[:-1]), tokens) for tokens, _, _ in rows])
        else:
            start, end, mask = self.frame
            masked = [(start, *ids[:first], *[mask] * (stop - first), *ids[stop:], end) for ids, first, stop in rows]
            columns, targets = zip(*((1 + first, ids[first]) for ids, first, _ in rows), strict=True)
            places = (torch.tensor(masked), torch.arange(len(rows)), torch.tensor(columns), torch.tensor(targets))
        losses, _, _ = score_places(model, *places)
        return -losses.view(len(rows), -1).sum(dim=-1, keepdim=True)

    def nan_message(self, index: int) -> str:
        where = self.sentences[self.items[index][0]]
        return f"the log-likelihood of every sentence must be a number, but that of one of {where} is nan"

    def answers(self, scores: list[list[float]]) -> list[Answer]:
        """Every pair by the first score, then by the second one."""
        found = {item: score for item, (score,) in zip(self.items, scores, strict=True)}
        sums: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
        for tokens in self.sentences:
            for name, spans in self.spans(tokens).items():
                sums[name][tokens] = math.fsum(found[tokens, *span] for span in spans)
        pairs = [(name, pair, of[pair.good], of[pair.bad]) for name, of in sums.items() for pair in self.pairs]
        return [Answer(name, pair.uid, pair.pair_id, good, bad, good > bad) for name, pair, good, bad in pairs]

    def metrics(self, scores: list[list[float]]) -> Metrics:
        """Compute the accuracy of each paradigm, its means over those of a group and over all, and the ties."""
        groups, right, means, ties = {pair.uid: pair.group for pair in self.pairs}, *map(defaultdict, (list, list, int))
        for answer in self.answers(scores):
            right[answer.score, answer.uid].append(answer.right)
            ties[f"{answer.score}/ties"] += answer.good == answer.bad
        for (name, uid), values in right.items():
            for key in (uid, f"group/{groups[uid]}", "accuracy"):
                means[f"{name}/{key}"].append(100 * fmean(values))
        counts = ties | {f"blimp/{key}": value for key, value in self.counts.items()}
        accuracies = {key: (fmean(values), "%") for key, values in means.items()}
        return accuracies | {key: (value, "count") for key, value in counts.items()}
