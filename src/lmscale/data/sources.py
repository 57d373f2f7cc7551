"""Documents from wherever they are: the embedded corpus, local files, or a Hugging Face dataset."""

import gzip
import hashlib
import json
import re
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..config.data import DataConfig
from .embedded import embedded_documents, embedded_fingerprint

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet")
HUB_PATIENCE_S = 10.0
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_SURROGATE = re.compile("[\ud800-\udfff]")


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


def open_corpus(config: DataConfig, key: str = "path") -> Corpus:
    """The corpus that `data=` names.

    In a .txt or .md file a blank line ends a document; a JSONL line, a parquet row and a dataset's row are one each.
    Files of a folder come in the order of their paths.

    Args:
        key: `path`, or `validation_path` for the file or folder held out.

    Raises:
        ValueError: a missing path or file, an unknown suffix, a dataset that cannot be loaded. What is wrong inside the
            files is found by `read`: no document, a missing field, bad JSON, undecodable bytes under
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
    # The suffix decides how bytes become documents, so it counts like the bytes.
    facts = [(next(s for s in SUFFIXES if name.endswith(s)), digest) for name, digest in hashes.items()]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Corpus(fingerprint, lambda: _read_files(files, hashes, config, key))


def check_corpus(config: DataConfig) -> None:
    """Refuse a corpus whose files are not there, without reading any.

    Raises:
        ValueError: a path that is missing, or has no file of a known suffix.
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
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
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
        raise ValueError(f"`data.{key}` must hold at least one document, but {getattr(config, key)} is empty of text")
    return Documents(texts, {"files": hashes, "undecodable_bytes": undecodable, "lone_surrogates": surrogates})


def _decode(file: Path, policy: str) -> tuple[str, int]:
    """The file's text and the number of bytes that are not UTF-8."""
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
    """The texts, and how many escaped lone surrogates (`\\ud800`), which are no characters, were replaced."""
    texts, bad = [], 0
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
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
    import pyarrow.parquet as parquet

    try:
        names = parquet.read_schema(file).names
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    if text_field not in names:
        raise ValueError(f"{file}: `data.text_field` must be one of its columns {names}, but is {text_field!r}")
    texts = parquet.read_table(file, columns=[text_field])[text_field].to_pylist()
    return _strings(texts, f"{file}: column `{text_field}` (data.text_field)")


def _strings(values: list, name: str) -> list[str]:
    """`values` without nulls and blanks; anything else than text is refused."""
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must hold text, but row {number} is {value!r}")
    return [value for value in values if value and value.strip()]


def _open_dataset(config: DataConfig) -> Corpus:
    import datasets
    import huggingface_hub

    # Without a network the libraries would ask six times, over half a minute, before they looked into their cache.
    is_offline = not Path(config.name).exists() and not _hub_answers()
    if is_offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        dataset = datasets.load_dataset(config.name, config.subset, split=config.split)
    except Exception as error:  # the library raises many kinds for: no such dataset, subset, split, no network
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if is_offline:
            reason += f" ({huggingface_hub.constants.ENDPOINT} was not reached: only the cache was searched)"
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
            raise ValueError(f"`data.name` must hold at least one document, but {config.name!r} is empty of text")
        return Documents(texts, {"dataset": config.name, "rows": len(dataset)})

    return Corpus(f"{config.name}-{config.subset}-{config.split}-{dataset._fingerprint}", read)


def _hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached, asked once; a refusal is an answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_PATIENCE_S)
    except urllib.error.HTTPError:
        return True
    except OSError:  # no such host, no route, no answer in time
        return False
    return True
