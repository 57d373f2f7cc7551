"""GPT's samples: windows over the concatenated documents."""

from pathlib import Path

import numpy as np

from ..config.data import DataConfig
from .gpt_index import GPTOrder, write_windows
from .index_cache import cached_index
from .indexed_dataset import CorpusPart, IndexedDataset, concatenate_ranges
from .prepare import PreparedCorpus


class GPTDataset:
    """Packed windows of s + 1 tokens that overlap by one, so every token except the first is predicted once.

    Documents are in corpus order, each followed by end-of-text. The sampler determines the order of the windows.

    Args:
        part: the documents.
        vocab_size: number of ids of the tokenizer.
        seq_length: s, tokens per sample.
        name: name of the part in messages.

    Raises:
        ValueError: the part is shorter than one window.

    Source: section 4.2 and Megatron-LM's GPT dataset.
    """

    def __init__(self, part: CorpusPart, vocab_size: int, seq_length: int, name: str) -> None:
        self.part, self.vocab_size, self.seq_length = part, vocab_size, seq_length
        self.dataset = IndexedDataset(part.prefix)
        self.first_token, end = self.dataset.document_starts(np.array([part.first, part.last])).tolist()
        self.num_tokens = end - self.first_token
        if self.num_tokens <= seq_length:
            raise ValueError(
                f"the {name} part must have at least `data.seq_length` + 1 ({seq_length + 1}) tokens, "
                f"but has {self.num_tokens}; "
                + (f"data.seq_length={self.num_tokens - 1} fits" if self.num_tokens > 1 else "more text is needed")
            )

    def __len__(self) -> int:
        """Number of windows per epoch."""
        return (self.num_tokens - 1) // self.seq_length

    def batch(self, epochs: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows `indices`: tokens, and labels shifted by one; `epochs` has no effect.

        Shapes:
            epochs, indices int64 [b]; tokens, labels int64 [b, s].

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        starts = self.first_token + indices * self.seq_length
        lengths = np.full(len(indices), self.seq_length + 1)
        return self._shifted(self.dataset.read_ranges(starts, lengths, self.vocab_size))

    def _shifted(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        windows = ids.reshape(-1, self.seq_length + 1)
        return {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


class ShuffledGPTDataset(GPTDataset):
    """The same with documents, and then windows, shuffled for this run; see `GPTOrder`.

    Args:
        part, vocab_size, seq_length, name: as above.
        seed: of the run.
        num_samples: how many samples the run takes from this dataset.
        index_folder: folder of the stored index of windows.
    """

    def __init__(
        self,
        part: CorpusPart,
        vocab_size: int,
        seq_length: int,
        name: str,
        seed: int,
        num_samples: int,
        index_folder: Path,
    ) -> None:
        super().__init__(part, vocab_size, seq_length, name)
        num_documents = part.last - part.first
        identity = f"{part.identity} {part.first}"
        self.shuffle = GPTOrder(identity, num_documents, self.num_tokens, seq_length, seed, num_samples)
        sizes = self.dataset.document_sizes(part.first, part.last)
        self.windows = cached_index(
            index_folder, "gpt", self.shuffle.facts, lambda file: write_windows(file, self.shuffle, sizes)
        )

    def __len__(self) -> int:
        """Number of windows over all epochs of the run."""
        return self.shuffle.num_windows

    def order(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch (0) and window of this dataset's samples number `places`, both int64 of that shape."""
        return np.zeros_like(places), self.shuffle.windows_at(places)

    def batch(self, epochs: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """As in the base class; a window may span any number of documents."""
        begins, ends = (self.windows.rows[which].astype(np.int64) for which in (indices, indices + 1))
        counts = ends[:, 0] - begins[:, 0] + 1  # documents per window
        last = np.cumsum(counts) - 1
        documents = self.part.first + self.shuffle.documents_at(concatenate_ranges(begins[:, 0], counts))
        starts, stops = self.dataset.document_starts(documents), self.dataset.document_starts(documents + 1)
        # The last token of a window is the first of the next one.
        stops[last] = starts[last] + ends[:, 1] + 1
        starts[last - counts + 1] += begins[:, 1]
        return self._shifted(self.dataset.read_ranges(starts, stops - starts, self.vocab_size))


def make_samples(
    prepared: PreparedCorpus,
    split: str,
    part: CorpusPart,
    config: DataConfig,
    seed: int,
    number: int = 0,
    num_samples: int | None = None,
) -> GPTDataset:
    """The samples of one dataset; those of a training split that is shuffled are shuffled for `num_samples`."""
    if num_samples is None or not prepared.shuffles_documents:
        return GPTDataset(part, prepared.vocab_size, config.seq_length, split)
    folder = Path(prepared.index_folder)
    return ShuffledGPTDataset(part, prepared.vocab_size, config.seq_length, split, seed, num_samples, folder)
