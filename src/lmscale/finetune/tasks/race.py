"""RACE: multiple-choice questions on articles of English examinations for middle and high school."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...config.finetune import TaskConfig
from ...text.tables import check_columns, jsonl_rows
from ..examples import ChoiceExample, RowReport, is_text
from ..metrics import accuracy
from ..sources import hub_rows, is_on_hub

LETTERS = "ABCD"
METRICS = {"middle": "race/accuracy_middle", "high": "race/accuracy_high"}
LEVELS = tuple(METRICS)


def score_race(chosen: list[int], labels: list[int], facts: dict[str, Any]) -> dict[str, float]:
    """Compute the accuracy in percent over all questions and per level."""
    found = {"race/accuracy": accuracy(chosen, labels)}
    for level in dict.fromkeys(facts["groups"]):
        mine = [i for i, group in enumerate(facts["groups"]) if group == level]
        found[METRICS[level]] = accuracy([chosen[i] for i in mine], [labels[i] for i in mine])
    return found


def read_race(task: TaskConfig, place: str, report: RowReport) -> list[ChoiceExample]:
    """Read questions of a folder (`middle/*.txt` and `high/*.txt`, one article per file), a JSONL file or a hub split.

    An object has `article`, `questions`, `options`, `id` and, except in test sets, `answers`. Its level is the folder's
    name, the field `level`, or the beginning of the id. A question's id is the article's id and its number.

    Raises:
        ValueError: a field is missing, or a folder has no such files.
    """
    examples: list[ChoiceExample] = []
    passages = _from_hub(task, place) if is_on_hub(place) else _from_files(Path(place), report)
    for where, level, passage in passages:
        examples += _questions(where, level, passage, report)
    return examples


def _from_files(path: Path, report: RowReport) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    if path.is_file():
        for where, passage in jsonl_rows(path):
            yield where, passage.get("level"), passage
        return
    files = sorted(path.rglob("*.txt"), key=lambda file: (file.parent, len(file.name), file.name))
    if not files:
        raise ValueError(f"{path} must hold files like middle/1.txt and high/1.txt, but has none")
    for file in files:
        name = file.relative_to(path)
        if any(part.startswith(".") for part in name.parts):
            report.note("skipped", "hidden file or folder", name.as_posix())
            continue
        level = next((part for part in file.relative_to(path.parent).parts[:-1][::-1] if part in LEVELS), None)
        passages = list(jsonl_rows(file))
        if not passages:
            report.refuse("a file must have an article", "", name.as_posix())
        for where, passage in passages:
            yield f"{name.as_posix()} {where}", level, passage


def _from_hub(task: TaskConfig, place: str) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    for where, row in hub_rows(task, place, ("example_id", "article", "question", "options", "answer")):
        one = {"questions": [row["question"]], "options": [row["options"]], "answers": [row["answer"]]}
        yield where, None, {"id": row["example_id"], "article": row["article"], "number": int(where.split()[1]), **one}


def _questions(where: str, level: str | None, passage: dict[str, Any], report: RowReport) -> list[ChoiceExample]:
    check_columns(f"{report.source} {where}", [*passage], ("article", "questions", "options", "id"))
    name, article, questions, options = (passage[key] for key in ("id", "article", "questions", "options"))
    level = level or next((level for level in LEVELS if str(name).startswith(level)), None)
    answers = passage.get("answers")
    if answers is None and isinstance(questions, list):
        answers = [None] * len(questions)
    lists = [questions, options, answers]
    sizes = [len(values) if isinstance(values, list) else values for values in lists]
    if not is_text(name):
        report.refuse("`id` must be a text", name, where)
    elif level not in LEVELS:
        report.refuse("the level must be middle or high, by folder, field or id", level, where)
    elif not is_text(article):
        report.refuse("`article` must be a text", article, where)
    elif not all(isinstance(values, list) and len(values) == len(questions) for values in lists):
        rule = "`questions`, `options` and `answers` must be lists of equal length"
        report.refuse(rule, sizes, where, "are of lengths")
    else:
        found = []
        for number, (question, choices, letter) in enumerate(zip(*lists, strict=True), start=1):
            spot = where if "number" in passage else f"{where} question {number}"
            if not is_text(question) or not question.strip():
                report.refuse("a question must be a non-empty text", question, spot)
            elif not isinstance(choices, list) or len(choices) != len(LETTERS) or not all(map(is_text, choices)):
                report.refuse("`options` must be four texts", choices, spot)
            elif letter is not None and letter not in [*LETTERS]:
                report.refuse("`answers` must be A, B, C or D", letter, spot)
            else:
                label = None if letter is None else LETTERS.index(letter)
                item = f"{name}-{passage.get('number', number - 1)}"
                found.append(ChoiceExample(item, level, article, question, tuple(choices), label))
        return found
    return []
