"""Read documents from the embedded corpus, local files, or a Hugging Face dataset."""

import gzip
import hashlib
import json
import os
import re
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..config.data import DataConfig
from .embedded import embedded_documents, embedded_fingerprint

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet")
HUB_TIMEOUT_S = 10.0
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Corpus:
    """Documents that are read on demand, and their fingerprint.

    Args:
        fingerprint: sha256 of the content (local, embedded) or the dataset's own fingerprint (Hugging Face).
        read: returns the documents; called only if the tokens are not in the cache.
    """

    fingerprint: str
    read: Callable[[], "Documents"]


@dataclass
class Documents:
    """Documents of a corpus.

    Args:
        texts: non-blank documents in order.
        notes: facts for the manifest: files, undecodable bytes, missing modules.
    """

    texts: list[str]
    notes: dict = field(default_factory=dict)


def open_corpus(config: DataConfig, key: str = "path") -> Corpus:
    """Open the corpus configured by `data=`.

    In a .txt or .md file a blank line ends a document; each JSONL line, parquet row and dataset row is one document.
    Files of a folder are read in the order of their paths.

    Args:
        key: `path`, or `validation_path` for the held-out file or folder.

    Raises:
        ValueError: a path or file is missing, a suffix is unknown, or a dataset cannot be loaded. Errors inside files
            are raised by `read`: no document, a missing field, bad JSON, undecodable bytes with
            `data.undecodable=refuse`.
    """
    if config.kind == "embedded":
        return Corpus(embedded_fingerprint(), _read_embedded)
    if config.kind == "huggingface":
        return _open_dataset(config)
    path = getattr(config, key)
    files = _list_files(Path(path), key)
    root = Path(path) if Path(path).is_dir() else Path(path).parent
    hashes = {file.relative_to(root).as_posix(): _sha256(file) for file in files}
    # The suffix determines how bytes become documents, so it is part of the fingerprint.
    facts = [(next(s for s in SUFFIXES if name.endswith(s)), digest) for name, digest in hashes.items()]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Corpus(fingerprint, lambda: _read_files(files, hashes, config, key))


def check_corpus(config: DataConfig) -> None:
    """Check that a local corpus has files, without reading them.

    Raises:
        ValueError: the path is missing or has no file of a known suffix.
    """
    if config.kind == "local":
        for key in ("path", "validation_path") if config.validation_path is not None else ("path",):
            _list_files(Path(getattr(config, key)), key)


def _read_embedded() -> Documents:
    texts, missing = embedded_documents()
    return Documents(texts, {"missing_modules": missing})


def _sha256(file: Path) -> str:
    try:
        with open(file, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _list_files(path: Path, key: str) -> list[Path]:
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if not p.is_dir() and p.name.endswith(SUFFIXES))
        check_regular(files, f"data.{key}")
        if not files:
            raise ValueError(f"`data.{key}` must hold files ending in {', '.join(SUFFIXES)}, but {path} has none")
    else:
        if path.exists():
            raise ValueError(f"`data.{key}` must be a file or a folder, but {path} is neither")
        raise ValueError(f"`data.{key}` must exist, but {path} does not")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(f"`data.{key}` must end in {', '.join(SUFFIXES)}, but is {file}")
    return files


def check_regular(paths: Iterable[Path], key: str) -> None:
    """Check that paths in a folder of input files are files: reading from a pipe would wait for ever.

    Raises:
        ValueError: one is a link without target, a pipe or a device.
    """
    for path in paths:
        if not path.is_file():
            what = "a pipe or device" if path.exists() else f"a link to {os.readlink(path)}, which does not exist"
            raise ValueError(f"`{key}` must hold files and links to files, but {path} is {what}")


def _read_files(files: list[Path], hashes: dict[str, str], config: DataConfig, key: str) -> Documents:
    texts, undecodable, surrogates = [], 0, 0
    for file in files:
        if file.suffix == ".parquet":
            texts += _read_parquet(file, config.text_field)
            continue
        content, bad = _decode(file, config.undecodable)
        undecodable += bad
        if file.suffix in (".txt", ".md"):
            texts += [text.strip("\n") for text in _BLANK_LINES.split(content)]
        else:
            found, bad = _read_json_lines(content, file, config)
            texts += found
            surrogates += bad
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"`data.{key}` must hold at least one document, but {getattr(config, key)} has no text")
    return Documents(texts, {"files": hashes, "undecodable_bytes": undecodable, "lone_surrogates": surrogates})


def _decode(file: Path, policy: str) -> tuple[str, int]:
    """Return the file's text and the number of bytes that are not UTF-8."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    try:
        return raw.decode("utf-8").replace("\r\n", "\n"), 0
    except UnicodeDecodeError as error:
        text = raw.decode("utf-8", "surrogateescape")
        bad = sum("\udc80" <= char <= "\udcff" for char in text)
        if policy == "refuse":
            raise ValueError(
                f"{file} must be UTF-8, but has {bad} undecodable bytes, the first at offset {error.start}; "
                "data.undecodable=replace puts U+FFFD in their place"
            ) from None
        text = "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)
        return text.replace("\r\n", "\n"), bad


def _read_json_lines(content: str, file: Path, config: DataConfig) -> tuple[list[str], int]:
    """Return the texts, and how many escaped lone surrogates (`\\ud800`) were replaced."""
    texts, bad = [], 0
    for number, line in enumerate(content.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: must be JSON, but {error}") from None
        text = row.get(config.text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(
                f"{file}, line {number}: must be an object with a string `{config.text_field}` (data.text_field), "
                f"but is {line[:60]!r}"
            )
        text, found = _SURROGATE.subn("\ufffd", text)
        if found and config.undecodable == "refuse":
            raise ValueError(
                f"{file}, line {number}: `{config.text_field}` must be Unicode text, but has {found} lone surrogates; "
                "data.undecodable=replace puts U+FFFD in their place"
            )
        texts.append(text)
        bad += found
    return texts, bad


def _read_parquet(file: Path, text_field: str) -> list[str]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        names, texts = parquet.read_schema(file).names, None
        if text_field in names:
            texts = parquet.read_table(file, columns=[text_field])[text_field].to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    if texts is None:
        raise ValueError(f"{file}: `data.text_field` must be one of its columns {names}, but is {text_field!r}")
    return _strings(texts, f"{file}: column `{text_field}` (data.text_field)")


def _strings(values: list, name: str) -> list[str]:
    """Return `values` without nulls and blank texts; raise an error for values of another type."""
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must hold text, but row {number} is {value!r}")
    return [value for value in values if value and value.strip()]


def _open_dataset(config: DataConfig) -> Corpus:
    import datasets
    import huggingface_hub

    # Without a network the libraries retry six times, for over half a minute, before they search their cache.
    is_offline = not Path(config.name).exists() and not can_reach_hub()
    if is_offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        dataset = datasets.load_dataset(config.name, config.subset, split=config.split)
    except Exception as error:  # the library raises many types: no such dataset, subset or split, no network
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if is_offline:
            reason += f" ({huggingface_hub.constants.ENDPOINT} could not be reached, so only the cache was searched)"
        raise ValueError(f"`data.name` must be a dataset that can be loaded, but {config.name!r}: {reason}") from None
    if config.text_field not in dataset.column_names:
        raise ValueError(
            f"`data.text_field` must be one of the dataset's columns {dataset.column_names}, "
            f"but is {config.text_field!r}"
        )

    def read() -> Documents:
        name = f"`data.name` {config.name!r}: column `{config.text_field}` (data.text_field)"
        texts = _strings(list(dataset[config.text_field]), name)
        if not texts:
            raise ValueError(f"`data.name` must hold at least one document, but {config.name!r} has no text")
        return Documents(texts, {"dataset": config.name, "rows": len(dataset)})

    return Corpus(f"{config.name}-{config.subset}-{config.split}-{dataset._fingerprint}", read)


def can_reach_hub() -> bool:
    """Test once whether the Hugging Face hub can be reached; an HTTP error counts as reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT_S)
    except urllib.error.HTTPError:
        return True
    except OSError:  # no such host, no route, or timeout
        return False
    return True
