"""Read evaluation files strictly, because an unexpected byte would change a published number."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TextFile:
    """Text of a file and sha256 of its bytes."""

    name: str
    text: str
    sha256: str


def read_text_file(path: str | Path) -> TextFile:
    """Read the text of a UTF-8 file with LF line ends.

    Raises:
        ValueError: the file is missing or empty, has another encoding or other line ends (both change the counts of
            words and tokens), or ends in the middle of a line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"`task.path` must be a file that can be read, but {path}: {error.strerror}") from None
    if not data.strip():
        raise ValueError(f"`task.path` must be a file with text, but {path} is empty")
    for mark, encoding in ((b"\xef\xbb\xbf", "a byte-order mark"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if data.startswith(mark):
            raise ValueError(f"`task.path` must be UTF-8 without a byte-order mark, but {path} begins with {encoding}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"`task.path` must be UTF-8, but {path}, line {line} has the byte {data[error.start]:#04x}"
        ) from None
    for letter, what in (("\r", "a carriage return"), ("\0", "a zero byte")):
        if letter in text:
            line = text.count("\n", 0, text.index(letter)) + 1
            raise ValueError(f"`task.path` must be plain text with LF line ends, but {path}, line {line} has {what}")
    if not text.endswith("\n"):
        line = text.count("\n") + 1
        raise ValueError(f"`task.path` must end with a line end, but {path}, line {line} is cut off")
    return TextFile(path.name, text, hashlib.sha256(data).hexdigest())
