"""Examples of the benchmarks, whatever file they came from, and an account of rows that are not usable."""

from dataclasses import dataclass, field

_MAX_LISTED = 10  # row numbers in a message


@dataclass(frozen=True)
class PairExample:
    """One or two texts and the number of their class; None where it is not known (test sets)."""

    id: str
    first: str
    second: str | None
    label: int | None


@dataclass(frozen=True)
class ChoiceExample:
    """A question on an article with its options and the number of the right one; `group` is the level."""

    id: str
    group: str
    article: str
    question: str
    options: tuple[str, ...]
    label: int | None


@dataclass(frozen=True)
class SpanExample:
    """A question whose answer is a part of the context: (text, first character) of each annotator; none: no answer."""

    id: str
    title: str
    context: str
    question: str
    answers: tuple[tuple[str, int], ...]
    is_labelled: bool


Example = PairExample | ChoiceExample | SpanExample


def is_text(value: object) -> bool:
    """Whether it is a string that a tokenizer takes: JSON can hold halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class RowAccount:
    """What was wrong with rows of one file: counted with their places, or refused.

    Args:
        source: name of the file or data set, for messages.
        skipped: places of the rows that were left out, by reason.
        kept: places of the rows that were taken although something is wrong, by what it is.
        refused: by rule, the places and the first offending value.
    """

    source: str
    skipped: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    def skip(self, reason: str, place: str) -> None:
        """Leave a row out."""
        self.skipped.setdefault(reason, []).append(place)

    def keep(self, flaw: str, place: str) -> None:
        """Take a row that would be left out elsewhere."""
        self.kept.setdefault(flaw, []).append(place)

    def refuse(self, rule: str, value: object, place: str) -> None:
        """A row breaks a rule; `check` will say so, with all others that do."""
        self.refused.setdefault(rule, (repr(value)[:80], []))[1].append(place)

    def check(self) -> None:
        """Raise what was refused.

        Raises:
            ValueError: one line with the rule, the first value and the rows.
        """
        for rule, (value, places) in self.refused.items():
            more = f"; {len(places)} such rows: {list_some(places)}" if len(places) > 1 else ""
            raise ValueError(f"{self.source} {places[0]}: {rule}, but is {value}{more}")

    def notes(self) -> list[str]:
        """A line for each reason why rows were left out, and for each flaw of rows that were not."""
        return [
            f"{self.source}: {len(places)} rows {what}, {reason}: {list_some(places)}"
            for what, found in (("left out", self.skipped), ("kept", self.kept))
            for reason, places in found.items()
        ]


def list_some(places: list[str]) -> str:
    """The first of some places, and how many more there are."""
    more = f" and {len(places) - _MAX_LISTED} more" if len(places) > _MAX_LISTED else ""
    return ", ".join(places[:_MAX_LISTED]) + more
