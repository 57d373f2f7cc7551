"""Read the rows of one file by its suffix: JSON lines, text, parquet, tar archives of texts; plain, .gz or .zst.

Files are streamed: only one row, one block of text or one parquet batch is in memory at a time.
"""

import codecs
import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from .input_files import PACKED, format_of, packing_of

MAX_ROW_BYTES = 2**30  # a row has to fit into memory several times over
PARQUET_ROWS, PARQUET_BYTES = 64, 2**24  # decoded at once; some corpora store a whole book per row
READ_ERRORS = (OSError, EOFError, zlib.error, tarfile.TarError, UnicodeDecodeError)

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's mark begins with the first one
_CONVERT = "; iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE converts UTF-16"
_SPLIT = "; pandas.read_json(FILE).to_json(NEW_FILE, orient='records', lines=True) splits it"
_BREAK = re.compile(rb"\r*\n|\r")  # LF, CR LF, and CR, as old Macs wrote; CR CR LF comes from converting CR LF again

Decode = Callable[[bytes, int], str]  # (bytes of a row, row number) -> text


class UnreadableError(Exception):
    """An error of a whole file; the message is completed with the file's name."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """One row of a file.

    Args:
        number: from 1: line (the first line of a text block), row, or member of an archive.
        text: None if the row has no usable text.
        name: the id given in the row, or None.
        fault: why there is no text, as `(kind, rule)`: `invalid_json`, `missing_text` or `zero_characters`, and "must
            be ..., but ..."; or `hidden_members`, which are left out.
    """

    number: int
    text: str | None
    name: str | None = None
    fault: tuple[str, str] | None = None


def read_rows(raw: BinaryIO, name: str, text_field: str, text_documents: str, decode: Decode) -> Iterator[TextRow]:
    """Yield the rows of a file in order.

    Args:
        raw: the stored file, opened at its beginning.
        name: file name; its suffix determines the format.
        text_field: field of a JSON object or column of a parquet file that holds the text; `id` holds the id.
        text_documents: what a document of a text file is: a `block` between blank lines, or the whole `file`.
        decode: converts bytes to text.

    Raises:
        UnreadableError: a row exceeds MAX_ROW_BYTES, text is UTF-16 or has a zero byte, a column is missing, JSON is
            an array, or an archive is cut off.
        Exception: one of READ_ERRORS if the file is truncated or damaged.
    """
    kind = format_of(name)
    if kind == "parquet":
        yield from _parquet_rows(raw, text_field, decode)
        return
    with unpacked(raw, name) as stream:
        if kind == "tar":
            yield from _tar_rows(stream, decode)
        elif kind == "json":
            yield from _json_rows(stream, text_field, decode)
        else:
            blocks = _blocks(stream) if text_documents == "block" else _whole(stream)
            for number, block in blocks:
                yield TextRow(number, decode(block, number).strip("\n"))


def row_of(values: object, number: int, text_field: str) -> TextRow:
    """Build the row of a JSON value or of a dataset's columns."""
    text = values.get(text_field) if isinstance(values, dict) else None
    if not isinstance(text, str):
        short = json.dumps(values, ensure_ascii=False, default=str)[:60]
        return TextRow(
            number, None, None, ("missing_text", f"must have a string `{text_field}` (text_field), but is {short}")
        )
    if "\0" in text:
        return TextRow(
            number, None, None, ("zero_characters", f"`{text_field}` must be text, but has a zero character")
        )
    name = values.get("id") if text_field != "id" else None
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    return TextRow(number, text, name if isinstance(name, str) and name else None)


@contextmanager
def unpacked(raw: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Open the content of a stored file, which its suffix says is packed or not."""
    packing = packing_of(name)
    if packing == ".gz":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield io.BufferedReader(stream, 2**20)
    elif packing == ".zst":
        yield io.BufferedReader(_ZstdStream(raw), 2**20)
    else:
        yield raw


class _ZstdStream(io.RawIOBase):
    """Decompress Zstandard frames; unlike the library's own reader, raise an error if the file is cut off."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._rest, self._frame, self._held = raw, b"", None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        import zstandard

        while not self._held:
            packed = self._rest or self._raw.read(2**14)  # small, because all of it is unpacked at once
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last Zstandard frame is not complete")
                return 0
            if self._frame is None:
                # The largest window size: corpora are often packed with --long=31.
                self._frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                self._held, self._rest = memoryview(self._frame.decompress(packed)), b""
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._held))
        buffer[:size], self._held = self._held[:size], self._held[size:]
        return size


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while read := stream.readline(MAX_ROW_BYTES + 1):
        _check_size(len(read), f"line {number + 1}")
        for line in plain_bytes(read, number + 1).splitlines(keepends=True):
            number += 1
            yield number, line


def plain_bytes(raw: bytes, line: int = 1, place: str = "") -> bytes:
    """Return the bytes of a text with LF line ends, and without the byte-order mark of UTF-8 that may begin a file.

    Args:
        line: number of the first line of `raw` in its file.
        place: what a message begins with.

    Raises:
        UnreadableError: they are UTF-16, with or without its mark, or contain a zero byte.
    """
    if line == 1 and raw.startswith(_UTF16):
        raise UnreadableError(f"{place}must be UTF-8, but begins with UTF-16's byte-order mark{_CONVERT}")
    if b"\r" in raw:
        raw = _BREAK.sub(b"\n", raw)
    if (zero := raw.find(0)) >= 0:
        line += raw.count(b"\n", 0, zero)
        found = f"line {line} has a zero byte, as UTF-16 has{_CONVERT}"
        raise UnreadableError(f"{place}must be plain UTF-8 text, but {found}")
    return raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw


def _check_size(size: int, place: str) -> None:
    if size > MAX_ROW_BYTES:
        raise UnreadableError(f"{place} must be at most {MAX_ROW_BYTES:,} bytes, but is longer")


def _blocks(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of lines between blank lines, with the number of the first line.

    A line of any spaces is blank: CJK text has ideographic ones (U+3000), and word processors write U+00A0.
    """
    held, first, size = [], 0, 0
    for number, line in _lines(stream):
        if line.decode("utf-8", "replace").strip():
            first, size = (first, size + len(line)) if held else (number, len(line))
            _check_size(size, f"the text from line {first}")
            held.append(line)
        elif held:
            yield first, b"".join(held)
            held = []
    if held:
        yield first, b"".join(held)


def _whole(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    text = stream.read(MAX_ROW_BYTES + 1)
    _check_size(len(text), "the text")
    if text:
        yield 1, plain_bytes(text)


def _json_rows(stream: BinaryIO, text_field: str, decode: Decode) -> Iterator[TextRow]:
    for number, line in _lines(stream):
        if not line.strip():
            continue
        if number == 1 and line.startswith(b"["):
            raise UnreadableError(f"must be one JSON object per line, but begins a JSON array{_SPLIT}")
        text = decode(line, number)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield TextRow(number, None, None, ("invalid_json", f"must be one JSON object per line, but is not: {why}"))
        else:
            yield row_of(values, number, text_field)


def _tar_rows(stream: BinaryIO, decode: Decode) -> Iterator[TextRow]:
    number = 0
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member, encoding="utf-8", errors="replace") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # the archive would keep every header
            if member.isdir():
                continue
            number += 1
            if any(part.startswith(".") and part not in (".", "..") for part in member.name.split("/")):
                yield TextRow(number, None, member.name, ("hidden_members", ""))
                continue
            if not member.isreg():
                rule = f"must be a file, but {member.name} is a link or device"
                yield TextRow(number, None, member.name, ("missing_text", rule))
                continue
            # Packed or structured members would be read as Latin-1 text.
            if format_of(member.name) not in (None, "text") or member.name.lower().endswith(PACKED):
                raise UnreadableError(f"must hold texts, but has {member.name}; unpack it first")
            _check_size(member.size, member.name)
            text = plain_bytes(archive.extractfile(member).read(), place=f"{member.name} ")
            yield TextRow(number, decode(text, number).strip("\n"), member.name)


class _Member(tarfile.TarInfo):
    """A header that distinguishes a cut-off archive from a complete one; `tarfile` stops silently at either."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise UnreadableError(f"must be a complete archive, but: {error} at byte {archive.offset:,}") from None


def _parquet_rows(raw: BinaryIO, text_field: str, decode: Decode) -> Iterator[TextRow]:
    import pyarrow as pa  # takes half a second to import
    import pyarrow.parquet as pq

    def is_text(kind: pa.DataType) -> bool:
        return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)

    try:
        file = pq.ParquetFile(raw, buffer_size=2**20, pre_buffer=False)  # else a row group's whole column is read
        names = file.schema_arrow.names
        if text_field not in names:
            raise UnreadableError(f"`text_field` must be one of its columns ({', '.join(names)}), but is {text_field}")
        if names.count(text_field) > 1:
            raise UnreadableError(f"must have one column {text_field}, but has {names.count(text_field)}")
        kinds = {field.name: field.type for field in file.schema_arrow if names.count(field.name) == 1}
        values = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in kinds.items()}
        if not is_text(values[text_field]):
            raise UnreadableError(f"column {text_field} must hold text, but holds {kinds[text_field]}")
        columns = [text_field]
        if text_field != "id" and "id" in values and (is_text(values["id"]) or pa.types.is_integer(values["id"])):
            columns.append("id")
        number = 0
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        rows = max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(row_bytes, 1)))
        for batch in file.iter_batches(rows, columns=columns):
            # Read as bytes: a text column may not be UTF-8.
            held = {
                name: column.cast(values[name]).cast(pa.large_binary()) if is_text(values[name]) else column
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            for row in zip(*(column.to_pylist() for column in held.values()), strict=True):
                number += 1
                decoded = [decode(value, number) if isinstance(value, bytes) else value for value in row]
                yield row_of(dict(zip(held, decoded, strict=True)), number, text_field)
    except pa.ArrowException as error:
        raise OSError(str(error)) from None
