"""Examples of the benchmarks, independent of their file format, and a report of unusable rows."""

from dataclasses import dataclass, field

from ..config.checks import is_line, list_some
from ..text.documents import SURROGATE


@dataclass(frozen=True)
class PairExample:
    """One or two texts, and the number of their class or a value; None if unknown (test sets)."""

    id: str
    first: str
    second: str | None
    label: int | float | None


@dataclass(frozen=True)
class ChoiceExample:
    """A question on an article, its options and the number of the right one; `group` is the level."""

    id: str
    group: str
    article: str
    question: str
    options: tuple[str, ...]
    label: int | None


@dataclass(frozen=True)
class SpanExample:
    """A question answered by spans of the context: (text, first character) per annotator; empty if unanswerable."""

    id: str
    context: str
    question: str
    answers: tuple[tuple[str, int], ...]
    is_labelled: bool


Example = PairExample | ChoiceExample | SpanExample


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be tokenized; JSON may contain lone surrogates."""
    return isinstance(value, str) and not SURROGATE.search(value)


@dataclass
class RowReport:
    """Faulty rows of one file.

    Args:
        source: name of the file or data set, for messages.
        noted: locations of rows that were skipped, or kept despite a flaw, by what was done and why.
        refused: by violated rule, the first offending value with its verb, and the locations.
    """

    source: str
    noted: dict[str, dict[str, list[str]]] = field(default_factory=lambda: {"skipped": {}, "kept": {}})
    refused: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    def note(self, what: str, reason: str, place: str) -> None:
        """Record a row that was `skipped`, or `kept` despite a flaw."""
        self.noted[what].setdefault(reason, []).append(place)

    def refuse(self, rule: str, value: object, place: str, verb: str = "is") -> None:
        """Record a row that violates a rule, for which `check` raises an error: RULE, but VERB VALUE."""
        self.refused.setdefault(rule, (f"{verb} {repr(value)[:80]}", []))[1].append(place)

    def read_id(self, value: object, column: str, place: str) -> str | None:
        """Return an id as text; None, and a refused row, if a row of a predictions file cannot begin with it."""
        name = str(value) if type(value) is int else value
        if is_line(name):
            return name
        self.refuse(f"`{column}` must be a whole number or one line of Unicode text without tabs", value, place)
        return None

    def check(self) -> None:
        """Raise an error if rows were refused.

        Raises:
            ValueError: one line with the rule, the first value and the rows.
        """
        for rule, (found, places) in self.refused.items():
            more = f"; {len(places)} such rows: {list_some(places)}" if len(places) > 1 else ""
            raise ValueError(f"{self.source} {places[0]}: {rule}, but {found}{more}")

    def notes(self) -> list[str]:
        """Return one line per reason for skipping rows, and per flaw of rows that were kept."""
        return [
            f"{len(places)} row{'s' * (len(places) > 1)} {what}, {reason}: {list_some(places)}"
            for what, found in self.noted.items()
            for reason, places in found.items()
        ]
