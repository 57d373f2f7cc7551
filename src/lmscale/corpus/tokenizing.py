"""The last step of a document: left out for its evaluation text, or tokenized into its source's part."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from ..data.indexed import IndexedWriter, best_dtype
from ..data.sentences import SentenceEncoder
from ..data.tokenizer import END_OF_TEXT, Tokenizer, read_tokenizer, train_tokenizer
from .collecting import PLACE
from .evaluation import EvaluationTexts
from .overlap import EvaluationIndex
from .progress import Meter
from .shingles import word_ngrams
from .work_folder import WorkFolder, complete_file, save_array

SPLITS = ("train", "validation")
TRAINING_CHARACTERS = 2**30  # of text that a tokenizer of one's own is trained on: the first documents by key
TABLE_ROWS = 256  # documents that are tokenized at once
TOKENIZER = "tokenizer.json"


def split_of(key: bytes, validation_every: int) -> str:
    """`validation` for one document of `validation_every`, decided by the key alone.

    A document therefore never moves from one part to the other when the corpus grows.
    """
    return SPLITS[int.from_bytes(key[8:], "big") % validation_every == 0]


def kept_batches(folder: WorkFolder, shard: int, num_shards: int) -> "list[pa.Table]":
    """The documents of a shard that are no near-duplicates, in tables of at most TABLE_ROWS."""
    first = int(folder.first_documents(num_shards)[shard])
    duplicates = folder.duplicates()
    for group in pq.ParquetFile(folder.shard_file("sorted", shard, "parquet")).iter_batches(batch_size=TABLE_ROWS):
        numbers = np.arange(first, first + len(group))
        first += len(group)
        held = group.filter(pa.array(~np.isin(numbers, duplicates)))
        if len(held):
            yield pa.Table.from_batches([held])


class _Writers:
    """The binary datasets of one shard, one for each source and split that has documents; a context manager."""

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
    """A tokenizer of the corpus's own, from the first documents by key: a random sample of the corpus."""

    type = "TOKENIZER"
    name = "train the tokenizer"

    def __init__(self, root: Path, num_shards: int, architecture: str, vocab_size: int, validation_every: int) -> None:
        super().__init__()
        self.folder, self.num_shards, self.architecture = WorkFolder(root), num_shards, architecture
        self.vocab_size, self.validation_every = vocab_size, validation_every

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """The only task."""
        trained = train_tokenizer(list(self._texts()), self.architecture, self.vocab_size, "tokenizer.vocab_size")
        with complete_file(self.folder.path(TOKENIZER)) as path:
            trained.save(str(path))

    def _texts(self) -> "list[str]":
        characters = 0
        with Meter(self.folder, "tokenizer", 0) as meter:
            for shard in range(self.num_shards):
                for table in kept_batches(self.folder, shard, self.num_shards):
                    for key, text in zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True):
                        if split_of(key, self.validation_every) != "train":
                            continue
                        if characters >= TRAINING_CHARACTERS:
                            return
                        characters += len(text)
                        meter.add(1, len(text))
                        yield text


class TokenizeShard(PipelineStep):
    """Tokenize what a shard keeps, without the documents that hold evaluation text.

    Args:
        root: of the work folder.
        num_shards: of the corpus.
        architecture: `gpt`: a sequence is a document closed by end-of-text; `bert`: a sequence is a sentence.
        validation_every: see `split_of`.
        evaluation: the texts not to train on, or None.
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
        seen = index.nothing_seen() if index is not None else None
        contaminated: list[dict] = []
        encode = self._encoder(tokenizer)
        with Meter(self.folder, "tokenize", rank) as meter, _Writers(self.folder, rank, tokenizer.vocab_size) as parts:
            for table in kept_batches(self.folder, rank, self.num_shards):
                rows = table.to_pylist()
                if index is not None:
                    rows = self._without_evaluation_text(rows, index, seen, contaminated)
                for (source, split), some in self._by_part(rows).items():
                    parts.add(source, split, *encode(some))
                meter.add(len(table), sum(len(row["text"]) for row in rows))
        self._save_overlap(rank, contaminated, seen)
        self.stat_update("contaminated", value=len({(row["file"], row["row"]) for row in contaminated}))

    def _without_evaluation_text(
        self, rows: list[dict], index: EvaluationIndex, seen: np.ndarray, contaminated: list[dict]
    ) -> list[dict]:
        values, offsets = word_ngrams([row["text"] for row in rows], self.ngram)
        found = index.contaminates(values, offsets, self.share)
        for document, item, share in zip(*found, strict=True):
            place = {name: rows[document][name] for name in PLACE}
            contaminated.append(place | {"item": index.names[item], "share": round(float(share), 6)})
        bad = set(np.asarray(found[0]).tolist())
        is_kept = np.array([i not in bad for i in range(len(rows))])
        is_train = np.array([split_of(row["key"], self.validation_every) == "train" for row in rows])
        index.mark_seen(values[np.repeat(is_kept & is_train, np.diff(offsets))], seen)
        return [row for i, row in enumerate(rows) if i not in bad]

    def _by_part(self, rows: list[dict]) -> dict[tuple[str, str], list[str]]:
        parts: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            parts.setdefault((row["source"], split_of(row["key"], self.validation_every)), []).append(row["text"])
        return parts

    def _encoder(self, tokenizer: Tokenizer) -> Callable[[list[str]], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What turns texts into ids, sizes of sequences and sequences a document."""
        if self.architecture == "gpt":
            end = tokenizer.id_of(END_OF_TEXT)
            return lambda texts: _encode_whole(tokenizer, end, texts)
        sentences = SentenceEncoder(tokenizer)

        def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            ids, sizes, counts, num_cut = sentences.encode(texts)
            self.stat_update("sentences_cut", value=num_cut)
            return ids, sizes, counts

        return encode

    def _save_overlap(self, rank: int, contaminated: list[dict], seen: np.ndarray | None) -> None:
        columns = {name: [row[name] for row in contaminated] for name in (*PLACE, "item", "share")}
        with complete_file(self.folder.shard_file("overlap", rank, "parquet")) as path:
            pq.write_table(pa.table(columns), path)
        if seen is not None:
            save_array(self.folder.shard_file("overlap", rank, "seen.npy"), seen)


def _encode_whole(tokenizer: Tokenizer, end: int, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each text as one sequence, closed by end-of-text."""
    encoded = [np.array(ids, dtype=np.int32) for ids in tokenizer.encode_batch(texts)]
    sizes = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
    joined = np.full(sizes.sum(), end, dtype=np.int32)
    is_text = np.ones(len(joined), dtype=bool)
    is_text[np.cumsum(sizes) - 1] = False
    joined[is_text] = np.concatenate(encoded)
    return joined, sizes, np.ones(len(texts), dtype=np.int64)
