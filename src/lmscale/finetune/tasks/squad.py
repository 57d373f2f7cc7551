"""SQuAD 1.1 and 2.0: answers that are parts of a Wikipedia paragraph, or (2.0) not there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...finetune_config import TaskConfig
from ..examples import RowAccount, SpanExample
from ..sources import hub_rows, is_on_hub, json_file


def read_squad(task: TaskConfig, place: str, account: RowAccount) -> list[SpanExample]:
    """Questions of an official JSON file or of a hub split, in their order.

    Raises:
        ValueError: another form of file.
    """
    return list(_from_hub(task, place, account) if is_on_hub(place) else _from_json(task, place, account))


def _from_json(task: TaskConfig, place: str, account: RowAccount) -> Iterator[SpanExample]:
    content = json_file(Path(place))
    try:
        for a, article in enumerate(content["data"]):
            for p, paragraph in enumerate(article["paragraphs"]):
                for q, qa in enumerate(paragraph["qas"]):
                    where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    yield from _example(task, article.get("title", ""), paragraph["context"], qa, where, account)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{place} must be SQuAD's official JSON, but fails with {error!r}") from None


def _from_hub(task: TaskConfig, place: str, account: RowAccount) -> Iterator[SpanExample]:
    for where, row in hub_rows(task, place, ("id", "title", "context", "question", "answers")):
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        answers = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
        yield from _example(task, row["title"], row["context"], row | {"answers": answers}, where, account)


def _example(
    task: TaskConfig, title: str, context: str, qa: dict[str, Any], where: str, account: RowAccount
) -> list[SpanExample]:
    """The question, or none where it is refused."""
    is_labelled = "answers" in qa
    answers = tuple((answer["text"], answer["answer_start"]) for answer in qa.get("answers", ()))
    if not isinstance(qa["question"], str) or not qa["question"].strip():
        account.refuse("a question must not be empty", (qa["id"], qa["question"]), where)
        return []
    for text, start in answers:
        if not text or not 0 <= start <= len(context) - len(text) or context[start : start + len(text)] != text:
            account.refuse("an answer must stand in its context at `answer_start`", (text, start, qa["id"]), where)
            return []
    if task.name == "squad_v1" and is_labelled and not answers:
        account.refuse("a question of SQuAD 1.1 must have an answer (task=squad_v2 takes such)", qa["id"], where)
        return []
    if task.name == "squad_v2" and bool(qa.get("is_impossible", not answers)) != (not answers) and is_labelled:
        account.refuse("a question must have answers or `is_impossible`, not both", qa["id"], where)
        return []
    return [SpanExample(qa["id"], title, context, qa["question"], answers, is_labelled)]
