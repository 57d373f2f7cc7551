"""SQuAD 1.1 and 2.0: answers are spans of a Wikipedia paragraph; in 2.0 some questions have none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...config.finetune import TaskConfig
from ..examples import RowReport, SpanExample, is_text
from ..sources import hub_rows, is_on_hub, json_file


def read_squad(task: TaskConfig, place: str, report: RowReport) -> list[SpanExample]:
    """Read questions of an official JSON file or of a hub split, in order.

    Raises:
        ValueError: the file has a different form.
    """
    return list(_from_hub(task, place, report) if is_on_hub(place) else _from_json(task, place, report))


def _from_json(task: TaskConfig, place: str, report: RowReport) -> Iterator[SpanExample]:
    content = json_file(Path(place))
    try:
        for a, article in enumerate(content["data"]):
            for p, paragraph in enumerate(article["paragraphs"]):
                for q, qa in enumerate(paragraph["qas"]):
                    where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    yield from _example(task, article.get("title", ""), paragraph["context"], qa, where, report)
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
        yield from _example(task, row["title"], row["context"], row | {"answers": answers}, where, report)


def _example(
    task: TaskConfig, title: str, context: str, qa: dict[str, Any], where: str, report: RowReport
) -> list[SpanExample]:
    """Return the question, or nothing if it is invalid."""
    name, question, found = qa.get("id"), qa.get("question"), qa.get("answers", [])
    if not is_text(name) or not name:
        report.refuse("`id` must be a text", name, where)
        return []
    if not is_text(question) or not question.strip():
        report.refuse("a question must be a non-empty text", (name, question), where)
        return []
    if not is_text(context):
        report.refuse("a context must be a text", (name, context), where)
        return []
    if not isinstance(found, list) or not all(isinstance(answer, dict) for answer in found):
        report.refuse("`answers` must be a list of objects", (name, found), where)
        return []
    is_labelled = "answers" in qa
    answers = tuple((answer.get("text"), answer.get("answer_start")) for answer in found)
    for text, start in answers:
        if not _occurs_in(context, text, start):
            report.refuse(
                "an answer must occur in its context at `answer_start`", (text, start, name), where, "this does not:"
            )
            return []
    if task.name == "squad_v1" and is_labelled and not answers:
        report.refuse(
            "a question of SQuAD 1.1 must have an answer (task=squad_v2 accepts none)", name, where, "this has none:"
        )
        return []
    if task.name == "squad_v2" and bool(qa.get("is_impossible", not answers)) != (not answers) and is_labelled:
        report.refuse(
            "a question must have answers or `is_impossible`, not both", name, where, "this has both or neither:"
        )
        return []
    return [SpanExample(name, title, context, question, answers, is_labelled)]


def _occurs_in(context: str, text: Any, start: Any) -> bool:
    if not isinstance(text, str) or not text.strip() or type(start) is not int:
        return False
    return 0 <= start and context[start : start + len(text)] == text
