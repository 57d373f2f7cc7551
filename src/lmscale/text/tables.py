"""Read the rows of a table, each with its location for messages: tab-separated lines, JSON lines, or one JSON value.

Unlike documents, a row keeps every character, and a blank line is a row: predictions are numbered by rows.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .whole_file import read_exact_text


def tsv_rows(
    path: Path, has_header: Callable[[list[str]], bool] = lambda cells: True
) -> tuple[Sequence[str | int], Iterator[tuple[str, list[str]]]]:
    """Read a tab-separated file without quoting, as GLUE's: the header, and (location, cells) of each further line.

    Args:
        has_header: whether the cells of line 1 are names; otherwise they are a row, and columns have numbers from 0.

    Raises:
        ValueError: as `read_exact_text`; or the file is empty, has other line ends, or two columns of one name.
    """
    lines = _lines(path)
    if not lines or not lines[0]:
        raise ValueError(f"{path} must begin with a line of column names, but {'line 1 ' * bool(lines)}is empty")
    if "\r" in lines[0]:
        raise ValueError(f"{path} must have lines that end in LF or CR LF, but line 1 has a lone CR")
    header = lines[0].split("\t")
    if not has_header(header):
        return range(len(header)), ((f"line {n}", line.split("\t")) for n, line in enumerate(lines, start=1))
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path} must have columns of different names, but has {twice!r} twice")
    return header, ((f"line {n}", line.split("\t")) for n, line in enumerate(lines[1:], start=2))


def _lines(path: Path) -> list[str]:
    """Split a file at LF and CR LF only, because a text may contain Unicode's other line ends; only at its end are
    blank lines no rows."""
    text = read_exact_text(path).rstrip("\r\n")
    return [line.removesuffix("\r") for line in text.split("\n")] if text else []


def check_columns(source: str, header: Sequence[str | int], needed: tuple[str | int, ...]) -> None:
    """Check that a table has the needed columns.

    Raises:
        ValueError: columns are missing; the message names all of them, and what is there.
    """
    missing = [name for name in needed if name not in header]
    if missing:
        raise ValueError(
            f"{source} must have the columns {', '.join(map(str, needed))}, but lacks {', '.join(map(str, missing))}"
            f"{_other_form([*map(str, header)])}"
        )


def _other_form(header: list[str]) -> str:
    """Say which other form a table without tabs seems to have, or else which columns it has."""
    if len(header) != 1:
        return f"; it has {textwrap.shorten(', '.join(header), 120) or 'none'}"
    if header[0].lstrip().startswith(("[", "{")):
        return ": it is JSON, of which FILE.jsonl with one object per line is read"
    return ": it is separated by commas, not by tabs" if "," in header[0] else ""


def json_file(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: as `read_exact_text`; or it is not JSON.
    """
    text = read_exact_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, but fails with {error}") from None


def jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) of each line.

    Raises:
        ValueError: as `read_exact_text`; or a line is not a JSON object.
    """
    for number, line in enumerate(_lines(path), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            found = f"fails with {error}" if line.strip() else "is blank"
            raise ValueError(f"{path} line {number} must be JSON, but {found}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path} line {number} must be a JSON object, but is {line[:40]!r}")
        yield f"line {number}", value
