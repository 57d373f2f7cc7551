"""Read documents from the embedded corpus, local files, or a Hugging Face dataset."""

import hashlib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.checks import refuse
from ..config.data import DataConfig
from ..text.documents import FileReport, ReadRules, read_documents, read_file, reason_of
from ..text.formats import row_of
from ..text.input_files import InputFiles, format_of, list_files, packing_of
from .embedded import embedded_documents, embedded_fingerprint

HUB_TIMEOUT_S = 10.0
Documents = tuple[list[str], dict]


@dataclass(frozen=True)
class Corpus:
    """Documents that are read on demand, and their fingerprint.

    Args:
        fingerprint: sha256 of the content (local, embedded) or the dataset's own fingerprint (Hugging Face).
        read: returns the non-blank documents in order, and facts for the manifest (files, problems by kind as in
            `FileReport`, missing modules); called only if the tokens are not in the cache.
        skipped: what is not read of a folder, one line; empty if nothing.
    """

    fingerprint: str
    read: Callable[[], Documents]
    skipped: str = ""


def open_corpus(config: DataConfig, key: str = "path") -> Corpus:
    """Open the corpus configured by `data=`.

    In a text file a blank line ends a document; each JSONL line, parquet row, dataset row and member of an archive is
    one document. Files of a folder are read in the order of their paths.

    Args:
        key: `path`, or `validation_path` for the held-out file or folder.

    Raises:
        ValueError: a path or file is missing, a suffix is unknown, or a dataset cannot be loaded. Errors inside files
            are raised by `read`: no document, and those of `read_file`.
    """
    if config.kind == "embedded":
        return Corpus(embedded_fingerprint(), embedded_documents)
    if config.kind == "huggingface":
        return _open_dataset(config)
    files = list_files(Path(getattr(config, key)), f"data.{key}")
    hashes = {file.relative_to(files.root).as_posix(): _sha256(file) for file in files.paths}
    # The suffix determines how bytes become documents, so it is part of the fingerprint.
    facts = [(f"{format_of(name)}{packing_of(name)}", digest) for name, digest in hashes.items()]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    skipped = f"data.{key}: {files.skipped}" if files.skipped else ""
    return Corpus(fingerprint, lambda: _read_files(files, hashes, config, key), skipped)


def _sha256(file: Path) -> str:
    try:
        with open(file, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _read_files(files: InputFiles, hashes: dict[str, str], config: DataConfig, key: str) -> Documents:
    rules = ReadRules("data", config.text_field, config.undecodable)
    texts, problems = [], Counter()
    for file in files.paths:
        report = FileReport(str(file))
        texts += [row.text for row in read_file(rules, report)]
        problems.update({kind: number for kind, (number, _) in report.problems.items()})
    if not texts:
        raise ValueError(f"`data.{key}` must hold at least one document, but {getattr(config, key)} has no text")
    return texts, {"files": hashes, "problems": dict(problems)}


def load_dataset(key: str, name: str, subset: str | None, split: str) -> Any:
    """Load a split of a dataset of the Hugging Face hub, of its cache, or of a local folder: an Arrow table on disk.

    Args:
        key: of the name, for messages.

    Raises:
        ValueError: it cannot be loaded.
    """
    import datasets  # takes seconds, which local files avoid
    import huggingface_hub

    # Without a network the libraries retry six times, for over half a minute, before they search their cache.
    is_offline = not Path(name).exists() and not can_reach_hub()
    if is_offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises many types: no such dataset, subset or split, no network
        reason = reason_of(error)
        if is_offline:
            reason += f" ({huggingface_hub.constants.ENDPOINT} could not be reached, so only the cache was searched)"
        where = "/".join(filter(None, (name, subset, split)))
        raise ValueError(f"`{key}` must be a dataset that can be loaded, but {where}: {reason}") from None


def _open_dataset(config: DataConfig) -> Corpus:
    dataset = load_dataset("data.name", config.name, config.subset, config.split)
    if config.text_field not in dataset.column_names:
        refuse("data.text_field", f"one of the dataset's columns {dataset.column_names}", config.text_field)

    def read() -> Documents:
        report, field = FileReport(f"`data.name` {config.name}"), config.text_field
        rows = (row_of({field: value}, number, field) for number, value in enumerate(dataset[field], start=1))
        texts = [row.text for row in read_documents(rows, ReadRules("data", field, config.undecodable), report)]
        if not texts:
            raise ValueError(f"`data.name` must hold at least one document, but {config.name!r} has no text")
        problems = {kind: number for kind, (number, _) in report.problems.items()}
        return texts, {"dataset": config.name, "rows": len(dataset), "problems": problems}

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
