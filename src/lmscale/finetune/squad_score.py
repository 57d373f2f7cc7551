"""SQuAD's exact match and F1, equal to the official evaluation scripts for 1.1 and 2.0."""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case a text and remove punctuation, articles and repeated spaces, for comparison by exact match.

    Source: the official evaluation scripts (Rajpurkar et al. 2016, 2018).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answer: str, both_empty: float = 1.0) -> float:
    """Compute the harmonic mean of precision and recall over common words, counted with repetition.

    Args:
        both_empty: score of two answers without words: 1 in version 2.0 of the script, 0 in 1.1.
    """
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted and not expected:
        return both_empty
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def score(dataset: Mapping[str, Any], predictions: Mapping[str, str]) -> dict[str, float]:
    """Compute exact match and F1 of predicted answers in percent, identical to the official scripts to the last digit.

    A question without prediction scores 0, as in the script for 1.1. (The script for 2.0 excludes it from the total and
    then fails.)

    Args:
        dataset: the official JSON, `{"version", "data": [...]}`.
        predictions: answer text by question id; "" means no answer.

    Returns:
        `exact_match`, `f1` and `total`; for 2.0 also `HasAns_exact`, `HasAns_f1`, `HasAns_total` and the same with
        `NoAns`, if there are such questions.

    Source: evaluate-v1.1.py and evaluate-v2.0.py of https://rajpurkar.github.io/SQuAD-explorer.
    """
    questions, second = _questions(dataset), dataset["version"].lstrip("v").startswith("2")
    exact, overlap = dict.fromkeys(questions, 0.0), dict.fromkeys(questions, 0.0)
    for name in questions.keys() & predictions.keys():
        exact[name], overlap[name] = _score_one(predictions[name], questions[name], second)
    scores = _means(exact, overlap, list(questions))
    if second:
        for label, wanted in (("HasAns_", True), ("NoAns_", False)):
            names = [name for name, answers in questions.items() if bool(answers) is wanted]
            if names:
                part = _means(exact, overlap, names)
                scores |= {f"{label}exact": part["exact_match"], f"{label}f1": part["f1"]}
                scores[f"{label}total"] = part["total"]
    return scores


def all_null_alarm(scores: Mapping[str, float]) -> str | None:
    """Return a warning if a 2.0 score equals the fraction of questions without answer, as if nothing was answered.

    Args:
        scores: from `score`; for 1.1 the result is always None.
    """
    if "HasAns_total" not in scores and "NoAns_total" not in scores:
        return None
    share = 100.0 * scores.get("NoAns_total", 0) / scores["total"]
    if not math.isclose(scores["f1"], share, abs_tol=1e-9) or not math.isclose(scores["exact_match"], share):
        return None
    return (
        f"the SQuAD 2.0 score ({share:.4f}) is the share of questions without answer: a system that never answers "
        "gets the same; look for a bug in the null answers"
    )


def best_null_threshold(
    dataset: Mapping[str, Any], predictions: Mapping[str, str], null_scores: Mapping[str, float]
) -> float:
    """Choose the null score up to which a question is answered, for the best F1.

    Args:
        predictions: the best non-null answer of each question, empty only if there is none.
        null_scores: by question; higher means that "no answer" is more likely.

    Returns:
        the lowest of equally good thresholds; -infinity if it is best never to answer.

    Source: `find_best_thresh` of evaluate-v2.0.py.
    """
    questions = _questions(dataset)
    # Starting from "no answer" for all questions, answer them one by one in ascending order of null score.
    current = float(sum(not answers for answers in questions.values()))
    threshold, best = -math.inf, 100.0 * current / len(questions)
    ordered = sorted(questions, key=lambda name: null_scores[name])
    for place, name in enumerate(ordered):
        answers, said = questions[name], _score_one(predictions[name], questions[name], True)[1]
        current += said if answers else (0.0 if predictions[name] else 1.0) - 1.0
        is_last_of_equals = place + 1 == len(ordered) or null_scores[ordered[place + 1]] > null_scores[name]
        value = 100.0 * current / len(questions)
        if is_last_of_equals and value > best + 1e-12:
            threshold, best = null_scores[name], value
    return threshold


def _questions(dataset: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the answers of each question in file order."""
    paragraphs = [paragraph for article in dataset["data"] for paragraph in article["paragraphs"]]
    return {qa["id"]: [answer["text"] for answer in qa["answers"]] for p in paragraphs for qa in p["qas"]}


def _score_one(prediction: str, answers: list[str], second: bool) -> tuple[float, float]:
    """Return exact match and F1 of one prediction, each the maximum over the answers."""
    if second:  # answers of only articles and punctuation do not count
        answers = [answer for answer in answers if normalize_answer(answer)] or [""]
    both_empty = 1.0 if second else 0.0
    exact = float(normalize_answer(prediction) in map(normalize_answer, answers))
    return exact, max((f1(prediction, answer, both_empty) for answer in answers), default=0.0)


def _means(exact: dict[str, float], overlap: dict[str, float], names: list[str]) -> dict[str, float]:
    total = len(names)
    return {
        "exact_match": 100.0 * _total(exact, names) / total,
        "f1": 100.0 * _total(overlap, names) / total,
        "total": total,
    }


def _total(values: dict[str, float], names: list[str]) -> float:
    """One after the other, as the script for 1.1: `sum` compensates rounding from Python 3.12 on, in the last digit."""
    total = 0.0
    for name in names:
        total += values[name]
    return total
