"""Reading sources: every file as a stream of documents, and an account of what could not be read as it should."""

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
from .formats import READ_ERRORS, SUFFIXES, Row, UnreadableError, format_of, read_rows
from .hub import list_parts, read_part
from .progress import Meter
from .work_folder import WorkFolder, complete_file

FAULTS = ("invalid_json", "missing_text")  # rows without text; `max_bad_rows` limits them
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class InputFile:
    """One file, or one part of a Hugging Face dataset.

    Args:
        source: name of the source it belongs to.
        name: path below the source's path; of a dataset its name, revision, subset, split and part.
        num_bytes: size as stored; of a dataset's part its share of the files' sizes.
        modified_ns: time of the last change, nanoseconds since the epoch; 0 for the hub, where the revision tells.
        path: where it is; None for a dataset.
        revision: of a dataset on the hub; None for one in a folder.
        part, num_parts: of a dataset.
    """

    source: str
    name: str
    num_bytes: int
    modified_ns: int
    path: str | None = None
    revision: str | None = None
    part: int = 0
    num_parts: int = 1


@dataclass
class ReadReport:
    """What was read from one file; plain values by `entry`.

    Args:
        file: which.
        sha256: of the file as stored; None for a part of a dataset.
        documents: given on to the next step.
        problems: kind -> [how often, row of the first]. Kinds: FAULTS, `undecodable` (not UTF-8), `lone_surrogates`,
            `empty_documents`, `empty_file`.
    """

    file: InputFile
    sha256: str | None = None
    documents: int = 0
    problems: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kind: str, row: int) -> None:
        """One more of a kind."""
        self.problems.setdefault(kind, [0, row])[0] += 1

    def entry(self) -> dict:
        """For the manifest."""
        return {
            "source": self.file.source,
            "file": self.file.name,
            "bytes": self.file.num_bytes,
            "sha256": self.sha256,
            "documents": self.documents,
            "problems": {kind: {"count": n, "first_row": row} for kind, (n, row) in sorted(self.problems.items())},
        }


def list_inputs(sources: dict[str, SourceConfig]) -> list[InputFile]:
    """All files and parts of datasets of the sources, by source and name.

    Raises:
        ValueError: a path that is missing or has no file of a known suffix, a dataset that cannot be loaded, or nothing
            but empty files.
    """
    found: list[InputFile] = []
    for source, config in sources.items():
        if config.kind == "huggingface":
            found += [InputFile(source, **part) for part in list_parts(source, config)]
        else:
            found += _list_files(source, Path(config.path))
    if not any(file.num_bytes for file in found):
        raise ValueError(f"`sources` must hold text, but all {len(found)} files are empty, {found[0].path} the first")
    return sorted(found, key=lambda file: (file.source, file.name))


def passed_over(sources: dict[str, SourceConfig]) -> list[str]:
    """What lies in the sources' folders and is not read: files of other kinds, and linked folders; a line a source."""
    notes = []
    for source, config in sources.items():
        if config.kind != "local" or not Path(config.path).is_dir():
            continue
        others = [p for p in Path(config.path).rglob("*") if p.is_file() and not format_of(p.name)]
        others += [p for p in Path(config.path).rglob("*") if p.is_dir() and p.is_symlink()]
        if others:
            notes.append(
                f"sources.{source}.path: {len(others)} files of other kinds or linked folders are passed over, "
                f"{min(others)} the first; the kinds are {', '.join(SUFFIXES)}"
            )
    return notes


def _list_files(source: str, path: Path) -> list[InputFile]:
    key = f"sources.{source}.path"
    if path.is_dir():
        root, paths = path, [p for p in path.rglob("*") if p.is_file() and format_of(p.name)]
        if not paths:
            raise ValueError(f"`{key}` must hold files ending in {', '.join(SUFFIXES)}, but {path} has none")
    elif path.is_file():
        root, paths = path.parent, [path]
        if not format_of(path.name):
            raise ValueError(f"`{key}` must end in {', '.join(SUFFIXES)}, but is {path}")
    elif path.exists():
        raise ValueError(f"`{key}` must be a file or a folder, but {path} is neither")
    else:
        raise ValueError(f"`{key}` must exist, but {path} does not")
    return [_describe(source, p, p.relative_to(root).as_posix()) for p in paths]


def _describe(source: str, path: Path, name: str) -> InputFile:
    stat = path.stat()
    # A file's name may be any bytes; it becomes part of ids and reports, which are text.
    name = os.fsencode(name).decode("utf-8", "replace")
    return InputFile(source, name, stat.st_size, stat.st_mtime_ns, str(path.absolute()))


class SourceReader(PipelineStep):
    """Documents of the inputs: task `rank` reads every `world_size`-th of them in order of source and name.

    A document's id is the row's own `id` (of an archive the member's name), else `<file>:<row>`; its metadata are
    `source`, `file` and `row`, counted from 1. Bytes that are not UTF-8 and rows without text are counted, and the
    first of each kind goes with its place into `inputs/<task>.json`, beside each file's sha256.

    Args:
        inputs: see `list_inputs`.
        sources: their configurations by name.
        max_bad_rows: rows without text (FAULTS) that a file may have.
        root: of the work folder.

    Raises:
        ValueError: when read: a file that is truncated, damaged, changed since it was listed or has too many bad rows,
            with its name and the row.
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
        with complete_file(self.folder.path("inputs", f"{rank:05d}.json")) as path:
            path.write_text(json.dumps(entries, indent=1, ensure_ascii=False), encoding="utf-8")

    def _timed_next(self, documents: Iterator[Document]) -> Document | None:
        with self.track_time():
            return next(documents, None)

    def _documents(self, file: InputFile, report: ReadReport) -> Iterator[Document]:
        config, is_empty = self.sources[file.source], True
        rows = _rows_of_file(file, config, report) if file.path is not None else read_part(file, config)
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


def _rows_of_file(file: InputFile, config: SourceConfig, report: ReadReport) -> Iterator[Row]:
    number = 0

    def decode(text: bytes, row: int) -> str:
        return _decode(text, row, config, report)

    try:
        with open(file.path, "rb") as raw:
            stat = os.fstat(raw.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (file.num_bytes, file.modified_ns):
                raise UnreadableError("must not change while it is prepared, but has changed since it was listed")
            report.sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            if file.num_bytes == 0:
                return  # an empty file is no valid gzip or parquet file either
            for row in read_rows(raw, file.path, config.text_field, config.text_documents, decode):
                number = row.number
                yield row
    except UnreadableError as error:
        raise ValueError(f"{file.path}: {error}") from None
    except READ_ERRORS as error:
        reason = str(getattr(error, "strerror", None) or error or type(error).__name__).splitlines()[0]
        place = f" after row {number}" if number else ""
        raise ValueError(f"{file.path} must be a complete, readable file, but is not{place}: {reason}") from None


def _decode(raw: bytes, row: int, config: SourceConfig, report: ReadReport) -> str:
    """Text of bytes that should be UTF-8, by the source's policy where they are not."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no text
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
    except UnicodeDecodeError:  # five bytes have no meaning there; in Latin-1 all have
        return raw.decode("latin-1")


def _without_surrogates(text: str, row: int, config: SourceConfig, report: ReadReport) -> str:
    """`text` with U+FFFD for halves of characters, which JSON can escape (`\\ud800`) and UTF-8 cannot write."""
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
