"""Decode answer texts from logits of first and last tokens in overlapping windows."""

from dataclasses import dataclass, field

import numpy as np

from .features import Features


@dataclass
class Candidates:
    """Answers of one question as (text, score), best first, and the score of "no answer"."""

    answers: list[tuple[str, float]] = field(default_factory=list)
    null_score: float = np.inf

    @property
    def text(self) -> str:
        """The best answer; empty if no window has one."""
        return self.answers[0][0] if self.answers else ""

    @property
    def null_odds(self) -> float:
        """Score of "no answer" minus that of the best answer; infinite if there is no answer."""
        return self.null_score - self.answers[0][1] if self.answers else np.inf


def decode_answers(
    features: Features, logits: list[np.ndarray], num_best: int, max_answer_length: int
) -> dict[str, Candidates]:
    """Find the best spans of every question over its windows.

    A span's score is the sum of the logits of its first and last token. Both must be context tokens, in order, and the
    span at most `max_answer_length` tokens long. Where windows overlap, a span counts in the window in which its first
    token has the most context. The score of "no answer" is that of [CLS] as first and last token, minimized over the
    windows.

    Args:
        logits: per window, [2, tokens of the window].

    Returns:
        candidates by id, in the order of the set.

    Source: Devlin et al. 2018, sections 4.2 and 4.3, and their `run_squad.py`.
    """
    contexts = [p["context"] for a in features.facts["dataset"]["data"] for p in a["paragraphs"] for _ in p["qas"]]
    found = {name: Candidates() for name in features.ids}
    spans: list[list[tuple[float, int, int]]] = [[] for _ in features.ids]
    most_context = _has_most_context(features)
    for window, scores in enumerate(logits):
        example = int(features.window_examples[window])
        candidates = found[features.ids[example]]
        candidates.null_score = min(candidates.null_score, float(scores[0, 0] + scores[1, 0]))
        offsets = features.offsets[features.starts[window] : features.starts[window + 1]]
        spans[example] += _best_spans(scores, offsets, most_context[window], num_best, max_answer_length)
    for example, name in enumerate(features.ids):
        texts: dict[str, float] = {}
        for score, begin, end in sorted(spans[example], reverse=True):
            texts.setdefault(contexts[example][begin:end], score)
        found[name].answers = list(texts.items())[:num_best]
    return found


def _best_spans(
    scores: np.ndarray, offsets: np.ndarray, most_context: np.ndarray, num_best: int, max_answer_length: int
) -> list[tuple[float, int, int]]:
    """Return the best (score, first character, last character excluded) of a window."""
    usable = offsets[:, 0] >= 0
    firsts = np.flatnonzero(usable & most_context)
    lasts = np.flatnonzero(usable)
    firsts = firsts[np.argsort(-scores[0, firsts], kind="stable")[:num_best]]
    lasts = lasts[np.argsort(-scores[1, lasts], kind="stable")[:num_best]]
    distance = lasts - firsts[:, None]
    allowed = (distance >= 0) & (distance < max_answer_length)
    sums = (scores[0, firsts].astype(np.float64)[:, None] + scores[1, lasts])[allowed]
    pairs = np.argwhere(allowed)
    best = np.argsort(-sums, kind="stable")[:num_best]
    return [(float(sums[i]), int(offsets[firsts[pairs[i, 0]], 0]), int(offsets[lasts[pairs[i, 1]], 1])) for i in best]


def _has_most_context(features: Features) -> list[np.ndarray]:
    """Mark, per window, the positions that have the most context in it; bool [tokens of the window]."""
    windows: dict[int, list[int]] = {}
    for window, example in enumerate(features.window_examples.tolist()):
        windows.setdefault(example, []).append(window)
    flags: list[np.ndarray] = [np.empty(0, dtype=bool)] * len(features)
    for mine in windows.values():
        for window in mine:
            flags[window] = np.ones(features.starts[window + 1] - features.starts[window], dtype=bool)
        if len(mine) == 1:
            continue
        ranges = [_context_tokens(features, window) for window in mine]
        tokens = np.arange(max(last for _, last in ranges))
        # min(tokens left, tokens right) + 0.01 x length, as in run_squad.py; -inf outside the window.
        scores = np.full((len(mine), len(tokens)), -np.inf)
        for row, (first, last) in enumerate(ranges):
            inside = tokens[first:last]
            scores[row, first:last] = np.minimum(inside - first, last - 1 - inside) + 0.01 * (last - first)
        best = scores.argmax(axis=0)
        for row, (window, (first, last)) in enumerate(zip(mine, ranges, strict=True)):
            shift = int(features.second_starts[window])
            flags[window][shift : shift + last - first] = best[first:last] == row
    return flags


def _context_tokens(features: Features, window: int) -> tuple[int, int]:
    """Return the first context token of a window and the one after its last."""
    length = features.starts[window + 1] - features.starts[window] - features.second_starts[window] - 1
    first = int(features.window_starts[window])
    return first, first + int(length)
