"""Evaluation texts that must not occur in the training data: read once, then shared by all tasks through a file."""

import json
import re
from itertools import pairwise
from pathlib import Path

from ..config.corpus import EvaluationSetConfig
from ..config.data import DataConfig
from ..data.sources import open_corpus
from ..text.documents import FileReport, ReadRules, read_file
from ..text.input_files import list_files
from ..text.whole_file import read_text_file
from .overlap import EvaluationIndex
from .work_folder import WorkFolder

EVALUATION_TEXTS = "evaluation.json"  # in the work folder: the texts of the items by set
_HEADING = re.compile(r"^ = (?!= ).* = $", re.MULTILINE)  # of an article; sections have two or more signs


def evaluation_index(work: WorkFolder) -> EvaluationIndex | None:
    """Build the index that finds the items' n-grams in documents; None if nothing is excluded."""
    if not work.config.evaluation_sets:
        return None
    items = json.loads(work.path(EVALUATION_TEXTS).read_text(encoding="utf-8"))
    return EvaluationIndex(items, work.config.overlap.ngram)


def read_evaluation_sets(sets: dict[str, EvaluationSetConfig]) -> dict[str, list[str]]:
    """Read the texts of the items of every evaluation set.

    Raises:
        ValueError: a set cannot be read, is empty or has a different form; the message names its key.
    """
    return {name: _read_items(f"evaluation_sets.{name}", config) for name, config in sets.items()}


def _read_items(key: str, config: EvaluationSetConfig) -> list[str]:
    if config.path is None:
        texts = _read_hub(key, config)
        found = _articles(key, "".join(texts)) if config.form == "wikitext" else texts
    elif config.form == "wikitext":
        found = _articles(key, read_text_file(config.path, f"{key}.path").text)
    else:
        rules = ReadRules(None, config.text_field)
        files = list_files(Path(config.path), f"{key}.path").paths
        found = [row.text for file in files for row in read_file(rules, FileReport(str(file)))]
    if not found:
        raise ValueError(f"`{key}` must hold evaluation text, but is empty")
    return found


def _read_hub(key: str, config: EvaluationSetConfig) -> list[str]:
    place = {"name": config.name, "subset": config.subset, "split": config.split, "text_field": config.text_field}
    try:
        return open_corpus(DataConfig("huggingface", 1, **place)).read()[0]
    except ValueError as error:
        hint = f"; {key}.path takes a local file, evaluation=none keeps test sets in the corpus"
        raise ValueError(str(error).replace("`data.", f"`{key}.") + hint) from None


def _articles(key: str, text: str) -> list[str]:
    """Split WikiText into articles: each begins with a line ` = Title = `; text before the first heading counts too."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    if text.strip() and not starts:
        raise ValueError(
            f"`{key}` must hold articles that begin with a line ` = Title = ` (form wikitext), but has none"
        )
    found = [text[a:b].strip() for a, b in pairwise([0, *starts, len(text)])]
    return [article for article in found if article]
