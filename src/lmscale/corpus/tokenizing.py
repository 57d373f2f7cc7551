"""Tokenize the remaining documents by source and split, without those that contain evaluation text."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from ..config.family import family_of
from ..data.indexed_writer import IndexedWriter, best_dtype
from ..data.sentences import document_encoder, text_pieces
from ..data.tokenizer import read_tokenizer, train_tokenizer
from .collecting import PLACE
from .evaluation_sets import EvaluationTexts
from .overlap import EvaluationIndex
from .progress import Meter
from .shingles import word_ngrams
from .work_folder import WorkFolder, atomic_write, save_array

SPLITS = ("train", "validation")
TRAINING_CHARACTERS = 2**30  # of text used to train a tokenizer: the first documents by key
TABLE_ROWS = 256  # documents tokenized at once
TOKENIZER = "tokenizer.json"
CONTAMINATED = pa.schema(
    [
        *((name, pa.int64() if name == "row" else pa.string()) for name in PLACE),
        ("item", pa.string()),  # set/number
        ("share", pa.float64()),  # of the item's n-grams found in the document
        ("place", pa.int64()),  # index in its batch
    ]
)


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: WorkFolder) -> None:
    """Write a tokenizer to the work folder.

    Raises:
        ValueError: it cannot be written.
    """
    path = folder.path(TOKENIZER)
    try:
        with atomic_write(path) as temporary:
            tokenizer.save(str(temporary))
    except Exception as error:  # the library raises bare Exception where a disk is full
        raise ValueError(f"{path} cannot be written: {error}") from None


def split_of(key: bytes, validation_every: int) -> str:
    """Return `validation` for one document in `validation_every`, otherwise `train`, from the key alone.

    A document therefore stays in its split when the corpus grows.
    """
    return SPLITS[int.from_bytes(key[8:], "big") % validation_every == 0]


def kept_batches(folder: WorkFolder, shard: int, num_shards: int, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the documents of a shard without near-duplicates, in tables of at most TABLE_ROWS and one row group."""
    first, end = folder.first_documents(num_shards)[shard : shard + 2]
    duplicates = folder.duplicates()
    is_kept = np.ones(end - first, dtype=bool)
    is_kept[duplicates[np.searchsorted(duplicates, first) : np.searchsorted(duplicates, end)] - first] = False
    file, start = pq.ParquetFile(folder.shard_file("sorted", shard, "parquet")), 0
    for group in range(file.num_row_groups):  # a batch over several would have the bytes of all of them
        for batch in file.iter_batches(batch_size=TABLE_ROWS, row_groups=[group], columns=columns):
            held = batch.filter(pa.array(is_kept[start : start + len(batch)]))
            start += len(batch)
            if len(held):
                yield pa.Table.from_batches([held])


class _Writers:
    """Writers of one shard's binary datasets, one per source and split that has documents; a context manager."""

    def __init__(self, folder: WorkFolder, shard: int, vocab_size: int) -> None:
        self.folder, self.shard, self.dtype = folder, shard, best_dtype(vocab_size)
        self.writers: dict[tuple[str, str], IndexedWriter] = {}

    def __enter__(self) -> "_Writers":
        return self

    def add(self, source: str, split: str, ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> None:
        """Append documents, see `IndexedWriter.add_documents`."""
        if (source, split) not in self.writers:
            prefix = self.folder.path("tokens", self.shard, f"{source}_{split}")
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self.writers[source, split] = IndexedWriter(prefix, self.dtype)
        self.writers[source, split].add_documents(ids, sizes, counts)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for writer in self.writers.values():
            if error is None:
                writer.finish()
            else:
                writer.discard()


class TrainTokenizer(PipelineStep):
    """Train a tokenizer on the first documents by key, a random sample of the corpus."""

    type = "TOKENIZER"
    name = "train the tokenizer"

    def __init__(self, root: Path, num_shards: int, architecture: str, vocab_size: int, validation_every: int) -> None:
        super().__init__()
        self.folder, self.num_shards, self.architecture = WorkFolder(root), num_shards, architecture
        self.vocab_size, self.validation_every = vocab_size, validation_every

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """The only task."""
        trained = train_tokenizer(list(self._texts()), self.architecture, self.vocab_size, "tokenizer.vocab_size")
        save_tokenizer(trained, self.folder)

    def _texts(self) -> Iterator[str]:
        characters = 0
        with Meter(self.folder, "tokenizer", 0) as meter:
            for shard in range(self.num_shards):
                for table in kept_batches(self.folder, shard, self.num_shards, ["key", "text"]):
                    for key, text in zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True):
                        if split_of(key, self.validation_every) != "train":
                            continue
                        if characters >= TRAINING_CHARACTERS:
                            return
                        characters += len(text)
                        meter.add(1, len(text))
                        yield from text_pieces(text)


class TokenizeShard(PipelineStep):
    """Tokenize the remaining documents of a shard, without those that contain evaluation text.

    Args:
        root: path of the work folder.
        num_shards: number of shards of the corpus.
        architecture: `gpt`: a sequence is a document followed by end-of-text; `bert`: a sequence is a sentence.
        validation_every: see `split_of`.
        evaluation: texts to exclude from training, or None.
        ngram, share: see OverlapConfig.
    """

    type = "TOKENIZER"
    name = "tokenize"

    def __init__(
        self,
        root: Path,
        num_shards: int,
        architecture: str,
        validation_every: int,
        evaluation: EvaluationTexts | None,
        ngram: int,
        share: float,
    ) -> None:
        super().__init__()
        self.folder, self.num_shards, self.architecture = WorkFolder(root), num_shards, architecture
        self.validation_every, self.evaluation, self.ngram, self.share = validation_every, evaluation, ngram, share

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Task `rank` tokenizes shard `rank`."""
        tokenizer = read_tokenizer(self.folder.path(TOKENIZER))
        index = self.evaluation.index(self.ngram) if self.evaluation is not None else None
        seen = index.new_seen() if index is not None else None
        contaminated = [CONTAMINATED.empty_table()]
        encode = document_encoder(tokenizer, family_of(self.architecture).corpus.sequence)
        columns = ["key", "source", "text"] if index is None else ["key", *PLACE, "text"]
        with Meter(self.folder, "tokenize", rank) as meter, _Writers(self.folder, rank, tokenizer.vocab_size) as parts:
            for table in kept_batches(self.folder, rank, self.num_shards, columns):
                texts = table["text"].to_pylist()
                splits = [split_of(key, self.validation_every) for key in table["key"].to_pylist()]
                places = range(len(texts))
                if index is not None:
                    found = self._find_evaluation_text(table, texts, splits, index, seen)
                    contaminated.append(found)
                    bad = set(found["place"].to_pylist())
                    places = [place for place in places if place not in bad]
                chosen: dict[tuple[str, str], list[str]] = {}
                sources = table["source"].to_pylist()
                for place in places:
                    chosen.setdefault((sources[place], splits[place]), []).append(texts[place])
                for (source, split), some in chosen.items():
                    ids, sizes, counts, num_cut = encode(some)
                    parts.add(source, split, ids, sizes, counts)
                    if num_cut is not None:
                        self.stat_update("sentences_cut", value=num_cut)
                meter.add(len(texts), sum(map(len, texts)))
        with atomic_write(self.folder.shard_file("overlap", rank, "parquet")) as path:
            pq.write_table(pa.concat_tables(contaminated).drop_columns("place"), path)
        if seen is not None:
            save_array(self.folder.shard_file("overlap", rank, "seen.npy"), seen)
        self.stat_update("contaminated", value=sum(len(set(held["place"].to_pylist())) for held in contaminated))

    def _find_evaluation_text(
        self, table: pa.Table, texts: list[str], splits: list[str], index: EvaluationIndex, seen: np.ndarray
    ) -> pa.Table:
        """Return which documents contain which items, as CONTAMINATED; mark the n-grams of training text in `seen`."""
        values, offsets = word_ngrams(texts, self.ngram)
        documents, items, shares = index.contaminates(values, offsets, self.share)
        is_trained = np.array([split == "train" for split in splits])
        is_trained[documents] = False
        index.mark_seen(values[np.repeat(is_trained, np.diff(offsets))], seen)
        columns = {name: table[name].take(pa.array(documents)) for name in PLACE}
        columns["item"] = [index.names[item] for item in items]
        columns |= {"share": shares, "place": documents}
        return pa.table(columns, schema=CONTAMINATED)
