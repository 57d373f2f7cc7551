"""Read sources as streams of documents, and report what was wrong in each file."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from ..config.corpus import SourceConfig
from ..data.formats import READ_ERRORS, Row, UnreadableError, read_rows, row_of
from .inputs import InputFile, first_line
from .progress import Meter
from .work_folder import WorkFolder, atomic_write

FAULTS = ("invalid_json", "missing_text")  # rows without text; `max_bad_rows` limits them
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class ReadReport:
    """Counts of one file.

    Args:
        file: the file.
        sha256: of the stored file; None for a part of a dataset.
        documents: number of documents passed to the next step.
        problems: kind -> [count, row of the first]. Kinds: FAULTS, `undecodable` (not UTF-8), `lone_surrogates`,
            `empty_documents`, `empty_file`.
    """

    file: InputFile
    sha256: str | None = None
    documents: int = 0
    problems: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kind: str, row: int) -> None:
        """Count one problem."""
        self.problems.setdefault(kind, [0, row])[0] += 1

    def entry(self) -> dict:
        """Return the entry of the manifest, as plain values."""
        return {
            "source": self.file.source,
            "file": self.file.name,
            "bytes": self.file.num_bytes,
            "sha256": self.sha256,
            "documents": self.documents,
            "problems": {kind: {"count": n, "first_row": row} for kind, (n, row) in sorted(self.problems.items())},
        }


class SourceReader(PipelineStep):
    """Read the documents of the inputs: task `rank` reads every `world_size`-th input, ordered by source and name.

    A document's id is the row's `id` (for an archive the member's name), or `<file>:<row>` if it has none. Its metadata
    are `source`, `file` and `row`, counted from 1. Bytes that are not UTF-8 and rows without text are counted;
    `inputs/<task>.json` holds these counts with the row of the first, and each file's sha256.

    Args:
        inputs: see `list_inputs`.
        sources: configurations of the sources by name.
        max_bad_rows: number of rows without text (FAULTS) allowed per file.
        root: path of the work folder.

    Raises:
        ValueError: while reading, if a file is truncated, damaged, has changed since it was listed, or has too many bad
            rows; the message names the file and the row.
    """

    type = "READER"
    name = "read"

    def __init__(
        self, inputs: Iterable[InputFile], sources: dict[str, SourceConfig], max_bad_rows: int, root: Path
    ) -> None:
        super().__init__()
        self.inputs = sorted(inputs, key=lambda file: (file.source, file.name))
        self.sources, self.max_bad_rows, self.folder = sources, max_bad_rows, WorkFolder(root)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents of one task."""
        entries = []
        with Meter(self.folder, "clean", rank) as meter:
            for file in self.inputs[rank::world_size]:
                report = ReadReport(file)
                documents = self._documents(file, report)
                while (document := self._timed_next(documents)) is not None:
                    meter.add(1, len(document.text))
                    yield document
                self.stat_update("documents", value=report.documents)
                for kind, (number, _) in report.problems.items():
                    self.stat_update(kind, value=number)
                entries.append(report.entry())
        with atomic_write(self.folder.path("inputs", f"{rank:05d}.json")) as path:
            path.write_text(json.dumps(entries, indent=1, ensure_ascii=False), encoding="utf-8")

    def _timed_next(self, documents: Iterator[Document]) -> Document | None:
        with self.track_time():
            return next(documents, None)

    def _documents(self, file: InputFile, report: ReadReport) -> Iterator[Document]:
        config, is_empty = self.sources[file.source], True
        rows = _rows_of_file(file, config, report) if file.path is not None else _rows_of_part(file, config)
        for row in rows:
            is_empty = False
            if row.fault is not None:
                self._count_fault(row, report)
                continue
            text = _without_surrogates(row.text, row.number, config, report)
            if not text.strip():
                report.count("empty_documents", row.number)
                continue
            report.documents += 1
            name = f"{file.name}:{row.number}" if row.name is None else _SURROGATE.sub("\ufffd", row.name)
            yield Document(text, name, metadata={"source": file.source, "file": file.name, "row": row.number})
        if is_empty:
            report.count("empty_file", 0)

    def _count_fault(self, row: Row, report: ReadReport) -> None:
        kind, rule = row.fault
        report.count(kind, row.number)
        bad = sum(report.problems.get(kind, [0])[0] for kind in FAULTS)
        if bad > self.max_bad_rows:
            which = "" if self.max_bad_rows == 0 else f"; it is bad row {bad} and `max_bad_rows` is {self.max_bad_rows}"
            raise ValueError(f"{_place(report.file)}, row {row.number}: {rule}{which}")


def check_number(inputs: Iterable[InputFile], sources: dict[str, SourceConfig]) -> None:
    """Check that files have a document for each split, by reading two; the reading stage reports other faults.

    Raises:
        ValueError: they have fewer than two documents.
    """
    found = 0
    for file in inputs:
        if file.path is None:
            return  # a dataset on the hub would be asked twice
        config = sources[file.source]
        try:
            with open(file.path, "rb") as raw:
                rows = read_rows(raw, file.path, config.text_field, config.text_documents, _decode_any)
                for row in rows if file.num_bytes else ():
                    found += row.fault is None and bool(row.text.strip())
                    if found == 2 or row.fault is not None:
                        return
        except (UnreadableError, *READ_ERRORS):
            return
    raise ValueError(f"`sources` must hold at least 2 documents, one to train on and one to validate, but hold {found}")


def _decode_any(text: bytes, row: int) -> str:
    return text.decode("utf-8", "replace")


def _rows_of_file(file: InputFile, config: SourceConfig, report: ReadReport) -> Iterator[Row]:
    number = 0

    def decode(text: bytes, row: int) -> str:
        return _decode(text, row, config, report)

    try:
        with open(file.path, "rb") as raw:
            stat = os.fstat(raw.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (file.num_bytes, file.modified_ns):
                raise UnreadableError("must not change during the preparation, but has changed since it was listed")
            report.sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            if file.num_bytes == 0:
                return  # an empty file would not be a valid gzip or parquet file
            for row in read_rows(raw, file.path, config.text_field, config.text_documents, decode):
                number = row.number
                yield row
    except UnreadableError as error:
        raise ValueError(f"{file.path}: {error}") from None
    except READ_ERRORS as error:
        reason = str(getattr(error, "strerror", None) or error or type(error).__name__).splitlines()[0]
        place = f" after row {number}" if number else ""
        raise ValueError(f"{file.path} must be a complete, readable file, but is not{place}: {reason}") from None


def _rows_of_part(file: InputFile, config: SourceConfig) -> Iterator[Row]:
    """Stream the rows of one part of a Hugging Face dataset, numbered from 1."""
    import datasets

    number = 0
    try:
        dataset = datasets.load_dataset(
            config.name, config.subset, split=config.split, revision=file.revision, streaming=True
        )
        for number, values in enumerate(dataset.shard(file.num_parts, file.part), start=1):
            yield row_of(values, number, config.text_field)
    except Exception as error:  # see inputs._list_parts
        place = f" after row {number}" if number else ""
        raise ValueError(
            f"{file.name} must be a readable part of a dataset, but is not{place}: {first_line(error)}"
        ) from None


def _decode(raw: bytes, row: int, config: SourceConfig, report: ReadReport) -> str:
    """Decode UTF-8, and apply the source's policy to bytes that are not UTF-8."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")  # byte-order mark
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        report.count("undecodable", row)
        if config.undecodable == "replace":
            return raw.decode("utf-8", "replace")
        if config.undecodable == "refuse":
            raise ValueError(
                f"{_place(report.file)}, row {row}: must be UTF-8, but byte {error.start} is {raw[error.start]:#04x}; "
                f"sources.{report.file.source}.undecodable=fall_back reads it as cp1252 or Latin-1"
            ) from None
    try:
        return raw.decode("cp1252")
    except UnicodeDecodeError:  # cp1252 leaves five bytes undefined, Latin-1 none
        return raw.decode("latin-1")


def _without_surrogates(text: str, row: int, config: SourceConfig, report: ReadReport) -> str:
    """Replace lone surrogates, which JSON can escape (`\\ud800`) but UTF-8 cannot encode, by U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    report.count("lone_surrogates", row)
    if config.undecodable == "refuse":
        raise ValueError(
            f"{_place(report.file)}, row {row}: must be Unicode text, but has lone surrogates; "
            f"sources.{report.file.source}.undecodable=replace puts U+FFFD in their place"
        )
    return _SURROGATE.sub("\ufffd", text)


def _place(file: InputFile) -> str:
    return file.path or file.name
