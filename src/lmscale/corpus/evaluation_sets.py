"""Evaluation texts that must not occur in the training data: read once, then shared by all tasks through a file."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..config.corpus import EvaluationSetConfig
from ..config.data import DataConfig
from ..data.sources import open_corpus
from ..text.documents import FileReport, ReadRules, read_file
from ..text.input_files import list_files
from ..text.whole_file import read_text_file
from .overlap import EvaluationIndex
from .work_folder import atomic_write

_HEADING = re.compile(r"^ = (?!= ).* = $", re.MULTILINE)  # of an article; sections have two or more signs


@dataclass(frozen=True)
class EvaluationTexts:
    """The items of each evaluation set, stored in a file that every task reads.

    Args:
        path: a JSON file that maps each set's name to a list of texts.
    """

    path: str

    def read(self) -> dict[str, list[str]]:
        """Return the texts of the items by set."""
        return json.loads(Path(self.path).read_text(encoding="utf-8"))

    def index(self, ngram: int) -> EvaluationIndex:
        """Build the index that finds the items' n-grams in documents."""
        return EvaluationIndex(self.read(), ngram)


def read_evaluation_sets(sets: dict[str, EvaluationSetConfig]) -> dict[str, list[str]]:
    """Read the texts of the items of every evaluation set.

    Raises:
        ValueError: a set cannot be read, is empty or has a different form; the message names its key.
    """
    return {name: _read_items(f"evaluation_sets.{name}", config) for name, config in sets.items()}


def write_evaluation_texts(items: dict[str, list[str]], path: Path) -> EvaluationTexts:
    """Write the items to `path`, from which every task reads them."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    return EvaluationTexts(str(path))


def articles(text: str) -> list[str]:
    """Split WikiText into articles: each begins with a line ` = Title = `; text before the first heading counts too."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    borders = [0, *starts, len(text)]
    found = [text[a:b].strip() for a, b in zip(borders[:-1], borders[1:], strict=True)]
    return [article for article in found if article]


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
        return open_corpus(DataConfig("huggingface", 1, **place)).read().texts
    except ValueError as error:
        hint = f"; {key}.path takes a local file, evaluation=none keeps test sets in the corpus"
        raise ValueError(str(error).replace("`data.", f"`{key}.") + hint) from None


def _articles(key: str, text: str) -> list[str]:
    if text.strip() and not _HEADING.search(text):
        raise ValueError(
            f"`{key}` must hold articles that begin with a line ` = Title = ` (form wikitext), but has none"
        )
    return articles(text)
