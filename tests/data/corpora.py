"""Prepared corpora for tests, from strings or from token lists."""

from pathlib import Path

import numpy as np

from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.data.indexed_corpus import identity_of
from lmscale.data.indexed_dataset import CorpusPart, IndexedDataset
from lmscale.data.indexed_writer import IndexedWriter
from lmscale.data.prepare import PreparedCorpus, prepare_corpus
from lmscale.data.sampler import Blend, EpochShuffle, GlobalBatchSampler


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


def write_dataset(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    """Write an indexed dataset of documents, each a list of sequences of ids; returns its prefix."""
    writer = IndexedWriter(prefix, dtype)
    add_documents(writer, documents)
    writer.finish()
    return prefix


def add_documents(writer: IndexedWriter, documents: list[list[list[int]]]) -> None:
    """Append documents, each a list of sequences of ids."""
    sequences = [ids for document in documents for ids in document]
    ids = np.concatenate([np.empty(0, dtype=np.int64), *filter(len, sequences)])
    writer.add_documents(ids, np.array(list(map(len, sequences)), dtype=int), np.array(list(map(len, documents))))


def whole(prefix: Path, weight: float = 1.0) -> CorpusPart:
    """All documents of a dataset."""
    dataset = IndexedDataset(prefix)
    return CorpusPart(str(prefix), 0, dataset.num_documents, identity_of(dataset), weight)


def epochs_of(size: int, batch: int, dp_rank: int, dp_size: int, seed: int, *steps: int) -> GlobalBatchSampler:
    """The order of one dataset that is shuffled again in every epoch."""
    return GlobalBatchSampler([EpochShuffle(size, f"order/{seed}")], Blend([1.0]), batch, dp_rank, dp_size, *steps)


class SyntheticBERTCorpus:
    """Random words with one piece in five a continuation, for statistics; quacks like a PreparedCorpus for `bert`.

    Ids 0-4 are the special tokens; ids of the upper fifth of the vocabulary are continuations.
    """

    vocab_size = 5000
    special_ids = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    samples = "lmscale.data.bert_dataset:make_samples"
    shuffles_documents = True

    def __init__(self, folder: Path, num_documents: int, sentences: int, sentence_length: int) -> None:
        generator = np.random.default_rng(5)
        total = num_documents * sentences * sentence_length
        ids = generator.integers(5, 4000, total)
        pieces = generator.random(total) < 0.2
        ids[pieces] = generator.integers(4000, 5000, pieces.sum())
        prefix = folder / f"synthetic_{num_documents}_{sentences}_{sentence_length}"
        writer = IndexedWriter(prefix, "uint16")
        sizes = np.full(num_documents * sentences, sentence_length)
        writer.add_documents(ids, sizes, np.full(num_documents, sentences))
        writer.finish()
        self.parts = {split: (whole(prefix),) for split in ("train", "validation")}
        self.index_folder = str(folder / "indices")

    def load_tokenizer(self):
        corpus = self

        class Tokenizer:
            is_continuation = np.arange(corpus.vocab_size) >= 4000

        return Tokenizer()
