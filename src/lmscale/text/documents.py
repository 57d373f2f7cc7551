"""Read the documents of files by one set of rules, and count what was wrong in each file."""

import hashlib
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .formats import READ_ERRORS, TextRow, UnreadableError, read_rows

FAULTS = ("invalid_json", "missing_text", "zero_characters")  # rows without text; `max_bad_rows` limits them
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ReadRules:
    """How the files of a source become documents.

    Args:
        key: configuration key of the source, `data` or `sources.<name>`, whose other values messages propose; None if
            it has none.
        text_field: field of a JSONL line, parquet row or dataset row that holds the text.
        undecodable: what is done with bytes that are not UTF-8, and with lone surrogates of JSON; see `SourceConfig`.
        text_documents: a document of a text file is a `block` between blank lines or the whole `file`.
        max_bad_rows: number of rows without text (FAULTS) allowed per file.
    """

    key: str | None
    text_field: str = "text"
    undecodable: str = "refuse"
    text_documents: str = "block"
    max_bad_rows: int = 0


@dataclass
class FileReport:
    """Counts of one file, or of one part of a dataset.

    Args:
        place: path or name, for messages.
        sha256: digest of the stored file; None for a dataset, or if it was not hashed.
        documents: number of documents read.
        problems: kind -> [count, row of the first]. Kinds: FAULTS, `undecodable` (not UTF-8), `lone_surrogates`,
            `empty_documents`, `hidden_members` (of an archive), `empty_file`.
    """

    place: str
    sha256: str | None = None
    documents: int = 0
    problems: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kind: str, row: int) -> None:
        """Count one problem."""
        self.problems.setdefault(kind, [0, row])[0] += 1


def read_file(rules: ReadRules, report: FileReport, stat: tuple[int, int] | None = None) -> Iterator[TextRow]:
    """Yield the documents of the file at `report.place`.

    Args:
        stat: size and modification time in nanoseconds when it was listed. With it, the file is also hashed.

    Raises:
        ValueError: the file is truncated, damaged, not text, has changed since it was listed, or has a row or bytes
            that the rules refuse; the message names the file and the row.
    """
    yield from read_documents(_rows_of_file(rules, report, stat), rules, report)


def read_documents(rows: Iterable[TextRow], rules: ReadRules, report: FileReport) -> Iterator[TextRow]:
    """Yield the rows that are documents, and count the others.

    Raises:
        ValueError: there are too many bad rows, or a text has lone surrogates and the rules refuse them.
    """
    is_empty = True
    for row in rows:
        is_empty = False
        if row.fault is not None:
            _count_fault(row, rules, report)
            continue
        text = _without_surrogates(row, rules, report)
        if not text.strip():
            report.count("empty_documents", row.number)
            continue
        report.documents += 1
        yield TextRow(row.number, text, row.name)
    if is_empty:
        report.count("empty_file", 0)


def _count_fault(row: TextRow, rules: ReadRules, report: FileReport) -> None:
    kind, rule = row.fault
    report.count(kind, row.number)
    bad = sum(report.problems.get(kind, [0])[0] for kind in FAULTS)
    if kind in FAULTS and bad > rules.max_bad_rows:
        which = f"; it is bad row {bad} and `max_bad_rows` is {rules.max_bad_rows}" if rules.max_bad_rows else ""
        advice = "; prepare_data.py skips such rows with max_bad_rows=N" if rules.key and not which else ""
        if rules.key and "(text_field)" in rule:  # an archive has no fields
            advice = f"; {rules.key}.text_field=NAME takes another field" + advice.replace(";", ", and", 1)
        raise ValueError(f"{report.place}, row {row.number}: {rule}{which}{advice}")


def _rows_of_file(rules: ReadRules, report: FileReport, stat: tuple[int, int] | None) -> Iterator[TextRow]:
    number, path = 0, report.place

    def decode(text: bytes, row: int) -> str:
        return _decode(text, row, rules, report)

    try:
        with open(path, "rb") as raw:
            now = os.fstat(raw.fileno())
            if stat is not None:
                if stat != (now.st_size, now.st_mtime_ns):
                    raise UnreadableError("must not change during the preparation, but has changed since it was listed")
                report.sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
                raw.seek(0)
            if now.st_size == 0:
                return  # an empty file would not be a valid gzip or parquet file
            for row in read_rows(raw, path, rules.text_field, rules.text_documents, decode):
                number = row.number
                yield row
    except UnreadableError as error:
        raise ValueError(f"{path}: {error}") from None
    except READ_ERRORS as error:
        place = f" after row {number}" if number else ""
        raise ValueError(f"{path} must be a complete, readable file, but is not{place}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """The first line of an error's message, or its type where the message is empty; then what first caused it."""
    text, root = _message_of(error), error
    while root.__cause__ is not None:
        root = root.__cause__
    reason = text.splitlines()[0]
    # All lines of the cause: the first of `datasets`' CastError is only "Couldn't cast".
    return reason if root is error else f"{reason}: {textwrap.shorten(_message_of(root), 500, placeholder=' ...')}"


def _message_of(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error).strip() or type(error).__name__


def _decode(raw: bytes, row: int, rules: ReadRules, report: FileReport) -> str:
    """Decode UTF-8, and apply the source's policy to bytes that are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        report.count("undecodable", row)
        if rules.undecodable == "replace":
            return raw.decode("utf-8", "replace")
        if rules.undecodable == "refuse":
            advice = f"; {rules.key}.undecodable=replace puts U+FFFD in its place, fall_back reads cp1252 or Latin-1"
            raise ValueError(
                f"{report.place}, row {row}: must be UTF-8, but byte {error.start} is {raw[error.start]:#04x}"
                f"{advice if rules.key else ''}"
            ) from None
    try:
        return raw.decode("cp1252")
    except UnicodeDecodeError:  # cp1252 leaves five bytes undefined, Latin-1 none
        return raw.decode("latin-1")


def _without_surrogates(row: TextRow, rules: ReadRules, report: FileReport) -> str:
    """Replace lone surrogates, which JSON can escape (`\\ud800`) but UTF-8 cannot encode, by U+FFFD."""
    if not SURROGATE.search(row.text):
        return row.text
    report.count("lone_surrogates", row.number)
    if rules.undecodable == "refuse":
        advice = f"; {rules.key}.undecodable=replace puts U+FFFD in their place" if rules.key else ""
        raise ValueError(f"{report.place}, row {row.number}: must be Unicode text, but has lone surrogates{advice}")
    return SURROGATE.sub("\ufffd", row.text)
