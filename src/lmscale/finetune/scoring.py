"""Convert logits to predictions and metrics."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config.finetune import TaskConfig
from .answers import decode_answers
from .features import Features
from .squad_score import all_null_alarm, best_null_threshold, score
from .tasks import HeadKind, benchmark_of
from .tasks.benchmark import Benchmark


@dataclass
class Predictions:
    """A model's predictions for one set.

    Args:
        answers: class names, numbers within the task's range or answer texts by id, in the order of the set.
        metrics: percent by name, nan where a score is undefined; empty if the labels are unknown.
        null_odds: SQuAD 2.0: score of "no answer" minus that of the best non-empty answer, by id.
        alarms: warnings for the user.
    """

    answers: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)
    null_odds: dict[str, float] | None = None
    alarms: list[str] = field(default_factory=list)


def predict_sets(
    task: TaskConfig, sets: dict[str, Features], logits: dict[str, list[np.ndarray]], chosen_on: list[str]
) -> tuple[dict[str, Predictions], dict[str, float]]:
    """Compute the predictions for every set and all metrics by full name.

    Args:
        logits: per item: [classes], [choices], or [2, tokens] of a window.
        chosen_on: validation sets. SQuAD 2.0's null threshold is tuned on the first; if there is none, it is the
            task's.

    Returns:
        predictions by set; metrics, such as mnli/accuracy, of all validation sets pooled (classes) or a set called
        dev, and with the set's name, such as mnli/accuracy_matched, of others.

    Raises:
        ValueError: SQuAD 2.0 has neither a validation set nor a threshold.
    """
    predict = _predict_spans if benchmark_of(task).head is HeadKind.SPAN else _predict_items
    predictions, metrics = predict(task, sets, logits, chosen_on)
    pooled = set(metrics)
    for name, found in predictions.items():
        for metric, value in found.metrics.items():
            metrics[metric if name == "dev" and metric not in pooled else f"{metric}_{name}"] = value
    return predictions, metrics


def with_units(metrics: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The metrics of `predict_sets` as a record has them."""
    return {name: {"value": value, "unit": _unit(name)} for name, value in metrics.items()}


def _unit(metric: str) -> str:
    if metric.endswith("null_threshold"):
        return "logits"
    is_correlation = metric.partition("/")[2].startswith(("matthews", "pearson", "spearman"))
    return "correlation x 100" if is_correlation else "%"


def metric_names(task: TaskConfig, sets: dict[str, Features], chosen_on: list[str]) -> list[str]:
    """Return the names of `predict_sets`' metrics, before a model has been run."""
    logits = {}
    for name, features in sets.items():
        is_span = benchmark_of(task).head is HeadKind.SPAN
        shapes = [(2, n) for n in np.diff(features.starts)] if is_span else [(1,)] * len(features)
        logits[name] = [np.zeros(shape) for shape in shapes]
    return list(predict_sets(task, sets, logits, chosen_on)[1])


def _predict_items(
    task: TaskConfig, sets: dict[str, Features], logits: dict[str, list[np.ndarray]], chosen_on: list[str]
) -> tuple[dict[str, Predictions], dict[str, float]]:
    """Predict each set, and score all labelled validation sets pooled (MNLI: matched and mismatched)."""
    benchmark, predictions = benchmark_of(task), {}
    decide = (lambda row: float(row[0])) if benchmark.head is HeadKind.REGRESSION else (lambda row: int(np.argmax(row)))
    chosen = {name: [decide(row) for row in rows] for name, rows in logits.items()}
    for name, features in sets.items():
        answers = {key: _answer(task, benchmark, c) for key, c in zip(features.ids, chosen[name], strict=True)}
        predictions[name] = Predictions(answers)
        if features.is_labelled:
            labels = features.labels.tolist()
            predictions[name].metrics = metrics = benchmark.score(chosen[name], labels, features.facts)
            undefined = " and ".join(metric for metric, value in metrics.items() if math.isnan(value))
            if len(set(chosen[name])) == 1 < len(set(labels)):
                also = f", so that {undefined} cannot be computed" if undefined else ""
                predictions[name].alarms = [
                    f"every example of {name} is predicted as {next(iter(answers.values()))}{also}: the model has not "
                    "learned the task; try more trainer.num_epochs, or another optimizer.lr"
                ]
            elif undefined:
                predictions[name].alarms = [f"{undefined} cannot be computed: the labels of {name} are all equal"]
    names = [name for name in chosen_on if sets[name].is_labelled]
    if not names or names == ["dev"]:
        return predictions, {}
    classes = [choice for name in names for choice in chosen[name]]
    labels = [label for name in names for label in sets[name].labels.tolist()]
    groups = [group for name in names for group in sets[name].facts.get("groups", [])]
    return predictions, benchmark.score(classes, labels, {"groups": groups})


def _answer(task: TaskConfig, benchmark: Benchmark, chosen: int | float) -> str:
    """The class, or the number within the task's range, which a submission must keep to."""
    if benchmark.head is HeadKind.REGRESSION:
        low, high = task.value_range
        return f"{min(max(chosen, low), high):.6g}"
    return benchmark.classes[chosen]


def _predict_spans(
    task: TaskConfig, sets: dict[str, Features], logits: dict[str, list[np.ndarray]], chosen_on: list[str]
) -> tuple[dict[str, Predictions], dict[str, float]]:
    candidates = {
        name: decode_answers(features, logits[name], task.num_best, task.max_answer_length)
        for name, features in sets.items()
    }
    threshold, metrics = None, {}
    if task.name == "squad_v2":
        threshold = task.null_threshold
        if threshold is None:
            if not chosen_on:
                raise ValueError("`task.null_threshold` must be given if `task.validation` has no set, but is null")
            name = chosen_on[0]
            texts = {key: found.text for key, found in candidates[name].items()}
            odds = {key: found.null_odds for key, found in candidates[name].items()}
            threshold = best_null_threshold(sets[name].facts["dataset"], texts, odds)
        metrics["squad_v2/null_threshold"] = threshold
    predictions = {}
    for name, found in candidates.items():
        # Not `null_odds > threshold`: a threshold of -infinity must reject every answer.
        answers = {
            key: "" if threshold is not None and not best.null_odds <= threshold else best.text
            for key, best in found.items()
        }
        odds = {key: best.null_odds for key, best in found.items()} if threshold is not None else None
        predictions[name] = Predictions(answers, null_odds=odds)
        if sets[name].is_labelled:
            scores = score(sets[name].facts["dataset"], answers)
            # squad_v1/exact_match, squad_v1/f1, squad_v2/exact_match, squad_v2/f1, squad_v2/HasAns_exact,
            # squad_v2/HasAns_f1, squad_v2/NoAns_exact, squad_v2/NoAns_f1: the names of the official scripts
            percent = {f"{task.name}/{key}": value for key, value in scores.items() if not key.endswith("total")}
            predictions[name].metrics = percent
            predictions[name].alarms = [alarm] if (alarm := all_null_alarm(scores)) else []
    return predictions, metrics
