"""Read a whole text file, such as an evaluation set or a file of prompts."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from .documents import reason_of
from .formats import READ_ERRORS, UnreadableError, plain_bytes, unpacked
from .input_files import is_text


@dataclass(frozen=True)
class TextFile:
    """Text of a file, without a byte-order mark and with LF line ends, and sha256 of the stored bytes."""

    name: str
    text: str
    sha256: str

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(file and line number for messages, line) of each line."""
        lines = self.text.removesuffix("\n").split("\n")
        return [(f"{self.name}, line {number}", line) for number, line in enumerate(lines, start=1)]


def read_text_file(path: str | Path, key: str) -> TextFile:
    """Read a UTF-8 file, plain or packed, with LF, CR LF or CR line ends.

    Args:
        key: key of the path in the configuration, for messages.

    Raises:
        ValueError: the file is missing, empty, damaged or not UTF-8 text.
    """
    path = Path(path)
    if not is_text(path.name):
        raise ValueError(f"`{key}` must be a text file, but is {path}")
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            with unpacked(file, path.name) as stream:
                data = plain_bytes(stream.read())
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(f"`{key}`", f"{path}, ", error, "CP1252") from None
    except UnreadableError as error:
        raise ValueError(f"`{key}`: {path} {error}") from None
    except READ_ERRORS as error:
        raise ValueError(f"`{key}` must be a file that can be read, but {path}: {reason_of(error)}") from None
    if not text:
        raise ValueError(f"`{key}` must be a file with text, but {path} is empty")
    return TextFile(path.name, text, digest)


def read_exact_text(path: Path) -> str:
    """Read a UTF-8 file, plain or packed, without a byte-order mark and with its own line ends.

    Raises:
        ValueError: it cannot be read or is not UTF-8.
    """
    try:
        with open(path, "rb") as file, unpacked(file, path.name) as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), "", error, "CP1252 or UTF-16") from None
    except READ_ERRORS as error:
        raise ValueError(f"{path} must be readable as UTF-8 text, but fails with {error}") from None


def _not_utf8(subject: str, place: str, error: UnicodeDecodeError, others: str) -> ValueError:
    line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
    return ValueError(
        f"{subject} must be UTF-8, but {place}line {line} has the byte {byte:#04x}; iconv -f ENCODING -t UTF-8 FILE > "
        f"NEW_FILE converts another encoding, such as {others}"
    )


def text_of_json(line: str, field: str, rule: str, where: str) -> str:
    """Return the text in a field of a JSON object.

    Args:
        rule: what every line must have, with the key of the file, for messages.

    Raises:
        ValueError: the line is not JSON, or has no such text, or one with a zero character.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule.partition(' must ')[0]} must have JSON on each line, but {where}: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise ValueError(f"{rule} on each line, but {where} does not")
    if "\0" in value[field]:
        raise ValueError(f"{rule} without zero characters on each line, but {where} has one")
    return value[field]
