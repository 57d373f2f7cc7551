"""The files of a tokenizer; lines end at LF or CR LF, and nowhere else."""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tokenizers

_SPECIAL = re.compile(r"<.*>|\[.*\]", re.DOTALL)
MAX_GAPS = 1 << 16  # ids without a token: the library lists them as it serializes, and ends the process without memory


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte-order mark.

    Raises:
        ValueError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be UTF-8 text, but: {error}") from None


def read_whole(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        ValueError: it is missing or damaged, or a BPE has lost merges, without which texts have other ids.
    """
    text = read_text(path)
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        reason = " ".join(str(error).split())  # it may quote a line end from the file
        raise ValueError(f"{path} must be a complete tokenizer.json, but: {reason}") from None
    _check_ids(path, inner.get_vocab())
    if isinstance(inner.model, tokenizers.models.BPE):
        _check_merges(path, json.loads(text)["model"], inner)
    return inner


def _check_merges(path: Path, model: dict[str, Any], inner: tokenizers.Tokenizer) -> None:
    if any(map(model.get, ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))):
        return  # their tokens need no merge, or are not the two parts joined
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = [token.content for token in inner.get_added_tokens_decoder().values()]
    if lost := _without_merge(model["vocab"], pairs, added):
        raise ValueError(
            f"{path} must have a merge for each of its tokens, but lacks {len(lost):,}, the first for {lost[0]!r}"
        )


def _without_merge(tokens: dict[str, int], pairs: Collection[Sequence[str]], added: Collection[str]) -> list[str]:
    """The tokens of a BPE that no merge makes, by their ids."""
    needed = {token for token in tokens if len(token) > 1 and not _SPECIAL.fullmatch(token)}
    return sorted(needed - {first + second for first, second in pairs} - set(added), key=tokens.get)


def _check_ids(path: Path, vocab: dict[str, int]) -> None:
    most, highest = len(vocab) + MAX_GAPS, max(vocab.values(), default=0)
    if highest >= most:
        raise ValueError(f"{path} must number its {len(vocab):,} tokens below {most:,}, but has the id {highest:,}")


def read_object(path: Path) -> dict[str, Any]:
    """The values of a JSON file.

    Raises:
        ValueError: it cannot be read, or is no JSON object.
    """
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, but: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a different value")
    return values


def read_ids(path: Path) -> dict[str, int]:
    """The ids by token of a JSON file.

    Raises:
        ValueError: the file is damaged.
    """
    ids = read_object(path)
    if not all(type(index) is int and index >= 0 for index in ids.values()):
        raise ValueError(f"{path} must give each token an id, but does not")
    return ids


def read_vocabulary(path: Path) -> dict[str, int]:
    """The ids by token of a `vocab.json`, or of a `vocab.txt`, whose line numbers are the ids.

    A token may be any character, such as U+2028, which `str.splitlines` takes for a line end. Blank lines at the end
    are no tokens.

    Raises:
        ValueError: the file is damaged.
    """
    if path.suffix == ".json":
        vocab = read_ids(path)
        _check_ids(path, vocab)
        return vocab
    return {line.rstrip(" \t"): index for index, line in enumerate(_lines(path))}


def read_bpe(vocab: Path, merges: Path, added: Collection[str] = ()) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The ids and the merges of a byte-level BPE.

    Args:
        added: tokens that need no merge, as bytes do and tokens such as <pad> or [PAD].

    Raises:
        ValueError: a file is damaged, or has lost merges, without which texts have other ids.
    """
    tokens, pairs = read_vocabulary(vocab), read_merges(merges)
    if lost := _without_merge(tokens, pairs, added):
        raise ValueError(
            f"{merges} must have a merge for each token of {vocab}, but lacks {len(lost):,}, the first for "
            f"{lost[0]!r}; copy it whole, or list tokens that need none in added_tokens.json"
        )
    return tokens, pairs


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
            raise ValueError(f"{path} must have two tokens per line, but line {number} is {line[:40]!r}")
        merges.append(pair)
    return merges


def _lines(path: Path) -> list[str]:
    return [line.removesuffix("\r") for line in read_text(path).rstrip("\r\n").split("\n")]
