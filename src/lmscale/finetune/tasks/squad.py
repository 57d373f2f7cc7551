"""SQuAD 1.1 and 2.0: answers are spans of a Wikipedia paragraph; in 2.0 some questions have none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...config.finetune import TaskConfig
from ...text.tables import json_file
from ..examples import RowReport, SpanExample, is_text
from ..sources import hub_rows, is_on_hub


def read_squad(task: TaskConfig, place: str, report: RowReport) -> list[SpanExample]:
    """Read questions of an official JSON file or of a hub split, in order.

    Raises:
        ValueError: the file has a different form.
    """
    return list(_from_hub(task, place, report) if is_on_hub(place) else _from_json(task, place, report))


def _from_json(task: TaskConfig, place: str, report: RowReport) -> Iterator[SpanExample]:
    content = json_file(Path(place))
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list):
        found = "is a list" if isinstance(content, list) else "has no list `data`"
        raise ValueError(f'{place} must be SQuAD\'s official JSON, {{"version", "data": [...]}}, but {found}')
    try:
        for a, article in enumerate(data):
            for p, paragraph in enumerate(article["paragraphs"]):
                for q, qa in enumerate(paragraph["qas"]):
                    where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    yield from _example(task, paragraph["context"], qa, where, report)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{place} must be SQuAD's official JSON, but fails with {error!r}") from None


def _from_hub(task: TaskConfig, place: str, report: RowReport) -> Iterator[SpanExample]:
    for where, row in hub_rows(task, place, ("id", "title", "context", "question", "answers")):
        try:
            texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
            answers = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
        except (LookupError, TypeError, ValueError):
            rule = "`answers` must have `text` and `answer_start`, lists of equal length"
            report.refuse(rule, row["answers"], where)
            continue
        yield from _example(task, row["context"], row | {"answers": answers}, where, report)


def _example(task: TaskConfig, context: str, qa: dict[str, Any], where: str, report: RowReport) -> list[SpanExample]:
    """Return the question, or nothing if it is invalid."""
    fault = _fault(task, context, qa)
    if fault is not None:
        rule, value, *verb = fault
        report.refuse(rule, value, where, *verb)
        return []
    answers = tuple((answer["text"], answer["answer_start"]) for answer in qa.get("answers", []))
    return [SpanExample(qa["id"], context, qa["question"], answers, "answers" in qa)]


def _fault(task: TaskConfig, context: Any, qa: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the first rule that a question violates, the value, and a verb if it is not "is"."""
    name, question, answers = qa.get("id"), qa.get("question"), qa.get("answers", [])
    if not is_text(name) or not name:
        return "`id` must be a text", name
    if not is_text(question) or not question.strip():
        return "a question must be a non-empty text", (name, question)
    if not is_text(context):
        return "a context must be a text", (name, context)
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        return "`answers` must be a list of objects", (name, answers)
    for text, start in ((answer.get("text"), answer.get("answer_start")) for answer in answers):
        if not _occurs_in(context, text, start):
            return "an answer must occur in its context at `answer_start`", (text, start, name), "this does not:"
    if "answers" not in qa:
        return None
    if task.name == "squad_v1" and not answers:
        return "a question of SQuAD 1.1 must have an answer (task=squad_v2 accepts none)", name, "this has none:"
    if task.name == "squad_v2" and bool(qa.get("is_impossible", not answers)) != (not answers):
        return "a question must have answers or `is_impossible`, not both", name, "this has both or neither:"
    return None


def _occurs_in(context: str, text: Any, start: Any) -> bool:
    if not isinstance(text, str) or not text.strip() or type(start) is not int:
        return False
    return 0 <= start and context[start : start + len(text)] == text
