"""What a run is given of its corpus: where the token files are, and what is known of them."""

from dataclasses import dataclass
from pathlib import Path

from .indexed_dataset import IndexedDataset
from .tokenizer import Tokenizer, read_tokenizer


@dataclass(frozen=True)
class CorpusPart:
    """A stretch of documents of one binary dataset.

    Args:
        prefix: path of its files.
        first, last: its documents [first, last) belong to the part.
        identity: hash of the dataset, which seeds its shuffles and names its indices.
        weight: share of the samples, relative to the other parts'.
    """

    prefix: str
    first: int
    last: int
    identity: str
    weight: float = 1.0


@dataclass(frozen=True)
class PreparedCorpus:
    """Binary datasets of one corpus and what is known of them; small and picklable.

    Args:
        folder: holds tokenizer.json, the tokenizer that made the tokens.
        architecture: the family, as `model.family`.
        special_ids: id by token, of the family's `special_tokens`.
        manifest: `sha256` and counts of both parts, source notes, versions; as `notes`, which are not in the file,
            lines for the user on what differs from what was asked.
        parts: by split, train or validation, the datasets that are blended.
        index_folder: where sample indices are kept.
        shuffles_documents: whether GPT's training documents are shuffled before they are laid end to end; a small
            corpus is read in its own order.
    """

    folder: str
    architecture: str
    vocab_size: int
    special_ids: dict[str, int]
    manifest: dict
    parts: dict[str, tuple[CorpusPart, ...]]
    index_folder: str
    shuffles_documents: bool = False

    def dataset(self, split: str) -> IndexedDataset:
        """The first dataset of a split, whole: the only one of a corpus prepared from text."""
        return IndexedDataset(self.parts[split][0].prefix)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return read_tokenizer(Path(self.folder) / "tokenizer.json")
