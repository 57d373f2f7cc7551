"""The vocabulary files of a published tokenizer; lines end at LF or CR LF, and nowhere else."""

import json
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte-order mark.

    Raises:
        ValueError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`tokenizer.path` must have files of UTF-8 text, but {path}: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The values of a JSON file.

    Raises:
        ValueError: it cannot be read, or is no JSON object.
    """
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`tokenizer.path` must have files of JSON, but {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"`tokenizer.path` must have files with a JSON object each, but {path} has another value")
    return values


def read_vocabulary(path: Path) -> dict[str, int]:
    """The ids by token of a `vocab.json`, or of a `vocab.txt`, whose line numbers are the ids.

    A token may be any character, such as U+2028, which `str.splitlines` takes for a line end. Blank lines at the end
    are no tokens.

    Raises:
        ValueError: the file is damaged.
    """
    if path.suffix == ".json":
        vocab = read_object(path)
        if not all(type(index) is int and index >= 0 for index in vocab.values()):
            raise ValueError(f"`tokenizer.path` must have an id for each token, but {path} does not")
        return vocab
    return {line.rstrip(" \t"): index for index, line in enumerate(_lines(path))}


def read_merges(path: Path) -> list[tuple[str, str]]:
    """The merges of a byte-level BPE, in their order.

    Raises:
        ValueError: a line is not two tokens.
    """
    merges = []
    for number, line in enumerate(_lines(path), start=1):
        pair = tuple(line.split(" "))
        if line.startswith("#version"):
            continue
        if len(pair) != 2:
            raise ValueError(f"`tokenizer.path` must have two tokens in each line of {path}, but line {number} has not")
        merges.append(pair)
    return merges


def _lines(path: Path) -> list[str]:
    return [line.removesuffix("\r") for line in read_text(path).rstrip("\r\n").split("\n")]
