"""The prepared corpus of a run: its token files and what is known of them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from .tokenizer import Tokenizer, read_tokenizer

INDEX_FOLDER = "indices"  # in the cache
MANIFEST, MANIFEST_FORMAT = "manifest.json", 1  # of a folder of prepare_data.py


@dataclass(frozen=True)
class CorpusPart:
    """A range of documents of one indexed dataset.

    Args:
        prefix: path of the files without suffix.
        first, last: the part consists of the documents [first, last).
        identity: hash of the dataset, which seeds its shuffles and names its indices.
        weight: fraction of the samples, relative to the other parts.
    """

    prefix: str
    first: int
    last: int
    identity: str
    weight: float = 1.0


@dataclass(frozen=True)
class PreparedCorpus:
    """Indexed datasets of one corpus and what is known of them; small and picklable.

    Args:
        folder: contains tokenizer.json, the tokenizer of the tokens.
        architecture: the family, as `model.family`.
        special_ids: id by token, of the family's `special_tokens`.
        manifest: `sha256` and counts of both splits, source notes, versions. `notes`, which are not in the file, are
            lines for the user on differences from the request.
        parts: the datasets to blend, by split (train, validation).
        index_folder: folder of the sample indices.
        shuffles_documents: whether GPT's training documents are shuffled before they are concatenated; a small corpus
            is read in order.
    """

    folder: str
    architecture: str
    vocab_size: int
    special_ids: dict[str, int]
    manifest: dict
    parts: dict[str, tuple[CorpusPart, ...]]
    index_folder: str
    shuffles_documents: bool = False

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the tokens."""
        return read_tokenizer(Path(self.folder) / "tokenizer.json")


def cache_error(cache: Path, error: OSError) -> ValueError:
    """The error of a run whose cache cannot be written."""
    return ValueError(
        "`data.cache_dir` must be a folder that can be written and has free space, but "
        f"{error.filename or cache}: {error.strerror}"
    )


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int | None) -> None:
    """Check that the model has a row for every id of the tokenizer.

    Raises:
        ValueError: the tokenizer has more ids than the model.
    """
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"`model.vocab_size` must be at least the tokenizer's {tokenizer.vocab_size} ids, but is {model_vocab_size}"
        )


def read_manifest(folder: Path, key: str) -> dict:
    """Read the manifest of a folder of prepare_data.py.

    Args:
        key: the key below `data` that names the folder, for messages.

    Raises:
        ValueError: it is missing, cannot be read, or lacks something that a run needs.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"`data.{key}` must be a folder of prepare_data.py or the path of a .bin and .idx without suffix, but "
            f"{folder} is a folder without {MANIFEST}"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else manifest
    if not isinstance(manifest, dict) or found != MANIFEST_FORMAT:
        raise ValueError(f"{path}: `format` must be {MANIFEST_FORMAT}, but is {repr(found)[:40]}")
    try:
        _check_manifest(manifest)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a manifest of prepare_data.py, but fails with {error!r}"[:300]) from None
    return manifest


def _check_manifest(manifest: dict) -> None:
    """Raise a LookupError, TypeError or AttributeError if what a run needs is missing or of a different type."""
    texts = [manifest["architecture"], manifest["tokenizer"], *manifest["sources"]]
    for source in manifest["sources"].values():
        if type(source["weight"]) not in (int, float) or not 0 <= source["weight"] < math.inf:
            raise TypeError(f"weight {source['weight']!r}")
        for split in source.keys() & {"train", "validation"}:
            texts += [source[split]["prefix"], source[split]["sha256"]]
            if type(source[split]["documents"]) is not int:
                raise TypeError(f"documents {source[split]['documents']!r}")
    for text in texts:
        if not text.isprintable():
            raise TypeError(f"text {text!r}")
