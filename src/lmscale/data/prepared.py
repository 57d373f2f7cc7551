"""The prepared corpus of a run: its token files and what is known of them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .tokenizer import Tokenizer, read_tokenizer


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
        make_samples: builds the family's samples, see `Family.samples`.
        special_ids: id by token, of the family's `special_tokens`.
        manifest: `sha256` and counts of both splits, source notes, versions. `notes`, which are not in the file, are
            lines for the user on differences from the request.
        parts: the datasets to blend, by split (train, validation).
        index_folder: folder of the sample indices.
        shuffles_documents: whether GPT's training documents are shuffled before they are concatenated; a small corpus
            is read in order.
    """

    folder: str
    make_samples: Callable
    vocab_size: int
    special_ids: dict[str, int]
    manifest: dict
    parts: dict[str, tuple[CorpusPart, ...]]
    index_folder: str
    shuffles_documents: bool = False

    @property
    def content_hash(self) -> str:
        """Hash of the tokenized training text."""
        identity = self.manifest["train"]["sha256"] + self.manifest["tokenizer"]
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the tokens."""
        return read_tokenizer(Path(self.folder) / "tokenizer.json")
