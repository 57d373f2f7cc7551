"""Read sources as streams of documents, and report what was wrong in each file."""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from operator import attrgetter

from datatrove.data import Document, DocumentsPipeline

from ..config.corpus import SourceConfig
from ..text.documents import SURROGATE, FileReport, ReadRules, read_documents, read_file, reason_of
from ..text.formats import TextRow, row_of
from .inputs import InputFile
from .progress import Meter
from .work_folder import WorkStep, save_json


class SourceReader(WorkStep):
    """Read the documents of the inputs: task `rank` reads every `world_size`-th input, ordered by source and name.

    A document's id is the row's `id` (for an archive the member's name), or `<file>:<row>` if it has none. Its metadata
    are `source`, `file` and `row`, counted from 1. Bytes that are not UTF-8 and rows without text are counted;
    `inputs/<task>.json` holds these counts with the row of the first, and each file's sha256.

    Raises:
        ValueError: while reading, if a file is truncated, damaged, has changed since it was listed, or has too many bad
            rows; the message names the file and the row.
    """

    name = "read"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the documents of one task."""
        entries = []
        with Meter(self.work, "clean", rank) as meter:
            for file in self.work.inputs[rank::world_size]:
                report = FileReport(file.path or file.name)
                documents = self._documents(file, report)
                while (document := self._timed_next(documents)) is not None:
                    meter.add(1, len(document.text))
                    yield document
                self.stat_update("documents", value=report.documents)
                for kind, (number, _) in report.problems.items():
                    self.stat_update(kind, value=number)
                entries.append(_entry(file, report))
        save_json(self.work.shard_file("inputs", rank, "json"), entries)

    def _timed_next(self, documents: Iterator[Document]) -> Document | None:
        with self.track_time():
            return next(documents, None)

    def _documents(self, file: InputFile, report: FileReport) -> Iterator[Document]:
        config = self.work.config.sources[file.source]
        rules = rules_of(file.source, config, self.work.config.max_bad_rows)
        if file.path is not None:
            rows = read_file(rules, report, (file.num_bytes, file.modified_ns))
        else:
            rows = read_documents(_rows_of_part(file, config), rules, report)
        for row in rows:
            name = f"{file.name}:{row.number}" if row.name is None else SURROGATE.sub("\ufffd", row.name)
            yield Document(row.text, name, metadata={"source": file.source, "file": file.name, "row": row.number})


def rules_of(source: str, config: SourceConfig, max_bad_rows: int) -> ReadRules:
    """The rules by which the files of a source are read."""
    key = f"sources.{source}"
    return ReadRules(key, config.text_field, config.undecodable, config.text_documents, max_bad_rows)


def _entry(file: InputFile, report: FileReport) -> dict:
    """The manifest's entry of a file, as plain values."""
    return {
        "source": file.source,
        "file": file.name,
        "bytes": file.num_bytes,
        "sha256": report.sha256,
        "documents": report.documents,
        "problems": {kind: {"count": n, "first_row": row} for kind, (n, row) in sorted(report.problems.items())},
    }


def check_first_documents(inputs: Iterable[InputFile], sources: dict[str, SourceConfig], max_bad_rows: int) -> None:
    """Read the first two documents of each source before the facts, which fix its keys, are written.

    Args:
        inputs: ordered by source.

    Raises:
        ValueError: as `read_file`; or all sources together hold fewer than two documents.
    """
    found = 0
    for source, files in groupby(inputs, attrgetter("source")):
        if sources[source].kind == "huggingface":  # which would be asked twice
            found += 2
            continue
        rules = rules_of(source, sources[source], max_bad_rows)
        rows = chain.from_iterable(read_file(rules, FileReport(file.path)) for file in files)
        found += sum(1 for _ in islice(rows, 2))
    if found < 2:
        rule = "at least 2 documents, one to train on and one to validate"
        raise ValueError(
            f"`sources` must hold {rule}, but hold {found}; a document of a text file ends at a blank line"
        )


def _rows_of_part(file: InputFile, config: SourceConfig) -> Iterator[TextRow]:
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
            f"{file.name} must be a readable part of a dataset, but is not{place}: {reason_of(error)}"
        ) from None
