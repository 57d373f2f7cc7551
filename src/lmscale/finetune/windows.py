"""Encode inputs of SQuAD: [CLS] question [SEP] window [SEP], with windows sliding over long contexts."""

import unicodedata
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from ..config.finetune import TaskConfig
from ..data.tokenizer import Tokenizer
from .examples import SpanExample
from .features import Features
from .pairs import pack


@dataclass(frozen=True)
class EncodedContext:
    """Ids of a context, and the first and last character (excluded) of each token; see `_character_spans`."""

    ids: list[int]
    begins: list[int]
    ends: list[int]


def encode_windows(task: TaskConfig, examples: list[SpanExample], tokenizer: Tokenizer) -> Features:
    """Encode one sequence per window of each question; windows begin every `doc_stride` tokens.

    The label is the first annotator's answer if the window contains all of it, otherwise [CLS] (position 0) twice.

    Source: Devlin et al. 2018, section 4.2, and their code.
    """
    cls, sep = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    questions = tokenizer.encode_batch([e.question.strip() for e in examples])
    contexts = _encode_contexts(list({e.context: None for e in examples}), tokenizer)
    sequences, labels, offsets, owners, firsts = [], [], [], [], []
    for number, (example, question) in enumerate(zip(examples, questions, strict=True)):
        question, context = question[: task.max_query_length], contexts[example.context]
        capacity = task.max_seq_length - len(question) - 3
        answer = _answer_tokens(example, context)
        for first in window_starts(len(context.ids), capacity, task.doc_stride):
            last, shift = min(first + capacity, len(context.ids)), len(question) + 2
            sequences.append(([cls, *question, sep, *context.ids[first:last], sep], shift))
            blank = [(-1, -1)]
            inside = list(zip(context.begins[first:last], context.ends[first:last], strict=True))
            offsets.append(blank * shift + inside + blank)
            labels.append(_label(example, answer, first, last, shift))
            owners.append(number)
            firsts.append(first)
    return Features(
        **pack(sequences),
        labels=np.array(labels, dtype=np.int64),
        ids=[e.id for e in examples],
        offsets=np.concatenate([np.array(rows, dtype=np.int32) for rows in offsets]),
        window_examples=np.array(owners, dtype=np.int32),
        window_starts=np.array(firsts, dtype=np.int32),
        facts={"dataset": official_json(examples, task.name)},
    )


def window_starts(num_tokens: int, capacity: int, stride: int) -> list[int]:
    """Return the first tokens of the windows over a context; the last window reaches its end.

    Args:
        capacity: context tokens per window; `stride` is at most that.
    """
    starts = [0]
    while starts[-1] + capacity < num_tokens:
        starts.append(starts[-1] + stride)
    return starts


def official_json(examples: list[SpanExample], task_name: str) -> dict:
    """Convert the examples to SQuAD's file format, with one paragraph per run of equal contexts."""
    paragraphs: list[dict] = []
    for example in examples:
        if not paragraphs or paragraphs[-1]["context"] != example.context:
            paragraphs.append({"context": example.context, "qas": []})
        qa = {"id": example.id, "question": example.question}
        qa["answers"] = [{"text": text, "answer_start": start} for text, start in example.answers]
        if task_name == "squad_v2":
            qa["is_impossible"] = not example.answers
        paragraphs[-1]["qas"].append(qa)
    version = "v2.0" if task_name == "squad_v2" else "1.1"
    return {"version": version, "data": [{"title": "all", "paragraphs": paragraphs}]}


def _encode_contexts(contexts: list[str], tokenizer: Tokenizer) -> dict[str, EncodedContext]:
    found = {}
    for start in range(0, len(contexts), 1024):  # encodings with offsets are large
        part = contexts[start : start + 1024]
        for context, encoding in zip(part, tokenizer.inner.encode_batch(part, add_special_tokens=False), strict=True):
            found[context] = EncodedContext(encoding.ids, *_character_spans(context, encoding.offsets))
    return found


def _character_spans(context: str, offsets: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the first and last character (excluded) of each token, with the characters that the normalizer has dropped
    (marks, format and control characters): a run of them belongs to the token before it, at the start of a word to the
    token after it.

    Source: google-research/bert `run_squad.py`, whose answers are whole words of the context.
    """
    begins, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
    for token in range(len(offsets)):
        before = ends[token - 1] if token else 0
        while begins[token] > before and not _is_space(context[begins[token] - 1]):
            begins[token] -= 1
        after = begins[token + 1] if token + 1 < len(begins) else len(context)
        while ends[token] < after and not _is_space(context[ends[token]]):
            ends[token] += 1
    return begins, ends


def _is_space(character: str) -> bool:
    """Return whether BERT's normalizer takes the character for white space; it drops other control characters."""
    return character in " \t\n\r" or unicodedata.category(character)[0] == "Z"


def _answer_tokens(example: SpanExample, context: EncodedContext) -> tuple[int, int] | None:
    """Return the first and last token that overlap the first answer; None if there is no answer."""
    if not example.answers:
        return None
    text, start = example.answers[0]
    first = bisect_right(context.ends, start)
    last = bisect_left(context.begins, start + len(text)) - 1
    return (first, last) if first <= last else None


def _label(example: SpanExample, answer: tuple[int, int] | None, first: int, last: int, shift: int) -> tuple[int, int]:
    if not example.is_labelled:
        return -1, -1
    if answer is None or answer[0] < first or answer[1] >= last:
        return 0, 0
    return answer[0] - first + shift, answer[1] - first + shift
