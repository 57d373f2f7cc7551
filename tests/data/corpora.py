"""Prepared corpora for tests: from strings, and a BERT one from bare token lists."""

from pathlib import Path

import numpy as np

from lmscale.data.prepare import PreparedCorpus, prepare_corpus
from lmscale.data_config import DataConfig, TokenizerConfig


def prepare_texts(folder: Path, texts: list[str], architecture: str, **changes) -> PreparedCorpus:
    """A local corpus of one JSONL file, with a trained tokenizer."""
    import json

    file = folder / "corpus.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    config = local_config(file, folder, **changes)
    return prepare_corpus(config, TokenizerConfig("trained", vocab_size=400), architecture, None)


def local_config(path: Path, cache: Path, **changes) -> DataConfig:
    """`data=local` with the cache in a temporary folder."""
    values = {"kind": "local", "seq_length": 16, "path": str(path), "cache_dir": str(cache / "cache")}
    return DataConfig(**(values | changes))


class SyntheticBERTCorpus:
    """Random words with one piece in five a continuation, for statistics; quacks like a PreparedCorpus for `bert`.

    Ids 0-4 are the special tokens; ids of the upper fifth of the vocabulary are continuations.
    """

    vocab_size = 5000
    special_ids = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}

    def __init__(self, num_documents: int, sentences: int, sentence_length: int) -> None:
        generator = np.random.default_rng(5)
        total = num_documents * sentences * sentence_length
        ids = generator.integers(5, 4000, total)
        pieces = generator.random(total) < 0.2
        ids[pieces] = generator.integers(4000, 5000, pieces.sum())
        self.arrays = {
            "tokens": ids.astype(np.int32),
            "sentences": np.arange(0, total + 1, sentence_length),
            "documents": np.arange(0, num_documents * sentences + 1, sentences),
        }

    def array(self, split: str, name: str) -> np.ndarray:
        return self.arrays[name]

    def load_tokenizer(self):
        corpus = self

        class Tokenizer:
            is_continuation = np.arange(corpus.vocab_size) >= 4000

        return Tokenizer()
