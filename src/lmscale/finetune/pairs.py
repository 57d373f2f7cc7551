"""Encode inputs of classification and multiple choice: [CLS] A [SEP] B [SEP]."""

import re

import numpy as np

from ..config.finetune import TaskConfig
from ..data.tokenizer import Tokenizer
from .examples import ChoiceExample, PairExample
from .features import Features


def clean_text(text: str) -> str:
    """Replace line ends and runs of white space by one space, and " . " by ". ".

    Source: Megatron-LM v1.0, `tasks/data_utils.py`; three passes, because matches can overlap.
    """
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def join_pair(first: list[int], second: list[int] | None, cls: int, sep: int, max_length: int) -> tuple[list[int], int]:
    """Join the ids of [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without B; returns them and how many precede B.

    An input that is too long is truncated at its end and closed with [SEP].

    Source: Megatron-LM v1.0, `build_tokens_types_paddings_from_ids`.
    """
    ids = [cls, *first] if second is None else [cls, *first, sep, *second]
    if len(ids) >= max_length:
        ids = ids[: max_length - 1]
    ids.append(sep)
    return ids, min(len(first) + 2, len(ids))


def encode_pairs(task: TaskConfig, examples: list[PairExample], tokenizer: Tokenizer) -> Features:
    """Encode examples of one or two texts, one sequence per example."""
    cls, sep = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    firsts = tokenizer.encode_batch([clean_text(e.first) for e in examples])
    seconds = tokenizer.encode_batch([clean_text(e.second or "") for e in examples])
    joined = [
        join_pair(a, None if e.second is None else b, cls, sep, task.max_seq_length)
        for e, a, b in zip(examples, firsts, seconds, strict=True)
    ]
    unknown, dtype = (np.nan, np.float64) if task.labels is None else (-1, np.int64)
    return Features(
        **pack(joined),
        labels=np.array([unknown if e.label is None else e.label for e in examples], dtype=dtype),
        ids=[e.id for e in examples],
    )


def encode_choices(task: TaskConfig, examples: list[ChoiceExample], tokenizer: Tokenizer) -> Features:
    """Encode RACE: one sequence per option, with A = question and option (at most `max_qa_length` tokens), B = article.

    The option replaces a gap "_" in the question, or is appended if there is none.

    Source: Megatron-LM v1.0, `tasks/race/data.py`.
    """
    cls, sep = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    texts = [clean_text(join_option(e.question, option)) for e in examples for option in e.options]
    asked = [ids[: task.max_qa_length] for ids in tokenizer.encode_batch(texts)]
    articles = {article: clean_text(article) for article in {e.article: None for e in examples}}
    encoded = dict(zip(articles, tokenizer.encode_batch(list(articles.values())), strict=True))
    num_choices = len(examples[0].options)
    joined = [
        join_pair(ids, encoded[examples[i // num_choices].article], cls, sep, task.max_seq_length)
        for i, ids in enumerate(asked)
    ]
    return Features(
        **pack(joined),
        labels=np.array([-1 if e.label is None else e.label for e in examples], dtype=np.int64),
        ids=[e.id for e in examples],
        num_choices=num_choices,
        facts={"groups": [e.group for e in examples]},
    )


def join_option(question: str, option: str) -> str:
    """Insert the option into the question's gaps, or append it if there is none."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def pack(sequences: list[tuple[list[int], int]]) -> dict[str, np.ndarray]:
    """Convert (ids, tokens before the second text) of each sequence to the arrays of `Features`."""
    lengths = [len(ids) for ids, _ in sequences]
    return {
        "tokens": np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in sequences]),
        "starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "second_starts": np.array([start for _, start in sequences], dtype=np.int32),
    }
