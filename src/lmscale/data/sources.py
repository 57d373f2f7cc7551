"""Documents from wherever they are: the embedded corpus, local files, or a Hugging Face dataset."""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..run_config import DataConfig
from .embedded import embedded_documents

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Documents still to be read, and what identifies them.

    Args:
        fingerprint: sha256 of the content (local, embedded) or the dataset's own fingerprint (Hugging Face).
        read: gives the documents; called only when the tokens are not in the cache.
    """

    fingerprint: str
    read: Callable[[], "Documents"]


@dataclass
class Documents:
    """What was read.

    Args:
        texts: documents in order, none blank.
        notes: facts for the manifest: files, undecodable bytes, modules that are missing.
    """

    texts: list[str]
    notes: dict = field(default_factory=dict)


def open_corpus(config: DataConfig, path: str | None = None) -> Corpus:
    """The corpus that `data=` names; `path` replaces `data.path` (the validation file).

    Raises:
        ValueError: a missing path or file, an unknown suffix, a dataset that cannot be loaded. What is wrong inside the
            files is found by `read`: no document, a missing field, bad JSON, undecodable bytes under
            `data.undecodable=refuse`.
    """
    if config.kind == "embedded":
        texts, missing = embedded_documents()
        digest = hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()
        return Corpus(digest, lambda: Documents(texts, {"missing_modules": missing}))
    if config.kind == "huggingface":
        return _open_dataset(config)
    if path is None and config.path is None:
        raise ValueError("`data.path` must name a file or folder when `data` is local, but is null")
    files = _list_files(Path(path or config.path))
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return Corpus(digest.hexdigest(), lambda: _read_files(files, config))


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        if not files:
            raise ValueError(f"`data.path` must hold files ending in {', '.join(SUFFIXES)}, but {path} has none")
    else:
        raise ValueError(f"`data.path` must exist, but {path} does not")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(f"`data.path` must end in {', '.join(SUFFIXES)}, but is {file}")
    return files


def _read_files(files: list[Path], config: DataConfig) -> Documents:
    texts, undecodable = [], 0
    for file in files:
        if file.suffix == ".parquet":
            texts += _read_parquet(file, config.text_field)
            continue
        content, bad = _decode(file, config.undecodable)
        undecodable += bad
        if file.suffix == ".txt":
            # A blank line ends a document: the convention of Wikipedia dumps and of BERT's own text format.
            texts += [text.strip("\n") for text in content.split("\n\n")]
        else:
            texts += _read_json_lines(content, file, config.text_field)
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"`data.path` must hold at least one document, but {files[0].parent} is empty of text")
    names = [file.name for file in files]
    return Documents(texts, {"files": names, "undecodable_bytes": undecodable})


def _decode(file: Path, policy: str) -> tuple[str, int]:
    """The file's text and the number of bytes that are not UTF-8."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError) as error:
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


def _read_json_lines(content: str, file: Path, text_field: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: must be JSON, but {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
            raise ValueError(
                f"{file}, line {number}: must be an object with a string `{text_field}` (data.text_field), "
                f"but is {line[:60]!r}"
            )
        texts.append(row[text_field])
    return texts


def _read_parquet(file: Path, text_field: str) -> list[str]:
    import pyarrow.parquet as parquet

    try:
        names = parquet.read_schema(file).names
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    if text_field not in names:
        raise ValueError(f"{file}: `data.text_field` must be one of its columns {names}, but is {text_field!r}")
    return [text for text in parquet.read_table(file, columns=[text_field])[text_field].to_pylist() if text]


def _open_dataset(config: DataConfig) -> Corpus:
    import datasets

    if config.name is None:
        raise ValueError("`data.name` must name a dataset when `data` is huggingface, but is null")
    try:
        dataset = datasets.load_dataset(config.name, config.subset, split=config.split)
    except Exception as error:  # the library raises many kinds for: no such dataset, subset, split, no network
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"`data.name` must be a dataset that can be loaded, but {config.name!r}: {reason}") from None
    if config.text_field not in dataset.column_names:
        raise ValueError(
            f"`data.text_field` must be one of the dataset's columns {dataset.column_names}, "
            f"but is {config.text_field!r}"
        )

    def read() -> Documents:
        texts = [text for text in dataset[config.text_field] if text and text.strip()]
        if not texts:
            raise ValueError(f"`data.name` must hold at least one document, but {config.name!r} is empty of text")
        return Documents(texts, {"dataset": config.name, "rows": len(dataset)})

    return Corpus(f"{config.name}-{config.subset}-{config.split}-{dataset._fingerprint}", read)
