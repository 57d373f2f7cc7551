"""Tokenize the remaining documents by source and split, without those that contain evaluation text."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..config.family import family_of
from ..data.indexed_corpus import TOKENIZER
from ..data.indexed_writer import IndexedWriter, best_dtype
from ..data.sentences import document_encoder, text_pieces
from ..data.tokenizer import DEFAULT_VOCAB_SIZE, read_tokenizer, train_tokenizer, write_tokenizer
from .collecting import PLACE
from .evaluation_sets import evaluation_index
from .overlap import EvaluationIndex
from .progress import Meter
from .shingles import word_ngrams
from .work_folder import WorkFolder, save_array, save_table

SPLITS = ("train", "validation")
TRAINING_CHARACTERS = 2**30  # of text used to train a tokenizer: the first documents by key
TABLE_ROWS = 256  # documents tokenized at once
CONTAMINATED = pa.schema(
    [
        *((name, pa.int64() if name == "row" else pa.string()) for name in PLACE),
        ("item", pa.string()),  # set/number
        ("share", pa.float64()),  # of the item's n-grams found in the document
    ]
)


def split_of(key: bytes, validation_every: int) -> str:
    """Return `validation` for one document in `validation_every`, otherwise `train`, from the key alone.

    A document therefore stays in its split when the corpus grows.
    """
    return SPLITS[int.from_bytes(key[8:], "big") % validation_every == 0]


def kept_batches(work: WorkFolder, shard: int, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the documents of a shard without near-duplicates, in tables of at most TABLE_ROWS and one row group."""
    first, end = work.first_documents()[shard : shard + 2]
    duplicates = work.duplicates()
    is_kept = np.ones(end - first, dtype=bool)
    is_kept[duplicates[np.searchsorted(duplicates, first) : np.searchsorted(duplicates, end)] - first] = False
    file, start = pq.ParquetFile(work.shard_file("sorted", shard, "parquet")), 0
    for group in range(file.num_row_groups):  # a batch over several would have the bytes of all of them
        for batch in file.iter_batches(batch_size=TABLE_ROWS, row_groups=[group], columns=columns):
            held = batch.filter(pa.array(is_kept[start : start + len(batch)]))
            start += len(batch)
            if len(held):
                yield pa.Table.from_batches([held])


def train_on_documents(work: WorkFolder, rank: int) -> dict[str, int]:
    """Train a tokenizer on the first documents by key, a random sample of the corpus."""
    config = work.config
    size = config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    trained = train_tokenizer(list(_texts(work)), config.architecture, size, "tokenizer.vocab_size")
    write_tokenizer(trained, work.path(TOKENIZER))
    return {}


def _texts(work: WorkFolder) -> Iterator[str]:
    characters = 0
    with Meter(work, "tokenizer", 0) as meter:
        for shard in range(work.num_shards):
            for table in kept_batches(work, shard, ["key", "text"]):
                for key, text in zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True):
                    if split_of(key, work.config.validation_every) != "train":
                        continue
                    if characters >= TRAINING_CHARACTERS:
                        return
                    characters += len(text)
                    meter.add(1, len(text))
                    yield from text_pieces(text)


def tokenize_shard(work: WorkFolder, rank: int) -> dict[str, int]:
    """Tokenize the remaining documents of a shard, without those that contain evaluation text."""
    config, tokenizer = work.config, read_tokenizer(work.path(TOKENIZER))
    index = evaluation_index(work)
    seen = index.new_seen() if index is not None else None
    contaminated, num_bad, cut = [CONTAMINATED.empty_table()], 0, Counter()
    encode = document_encoder(tokenizer, family_of(config.architecture).corpus.sequence)
    columns = ["key", "source", "text"] if index is None else ["key", *PLACE, "text"]
    writers: dict[tuple[str, str], IndexedWriter] = {}  # one per source and split that has documents
    work.path("tokens", rank).mkdir(parents=True, exist_ok=True)
    with Meter(work, "tokenize", rank) as meter, ExitStack() as stack:
        for table in kept_batches(work, rank, columns):
            texts = table["text"].to_pylist()
            splits = [split_of(key, config.validation_every) for key in table["key"].to_pylist()]
            places = range(len(texts))
            if index is not None:
                bad, found = _find_evaluation_text(work, table, texts, splits, index, seen)
                contaminated.append(found)
                num_bad += len(bad)
                places = [place for place in places if place not in bad]
            chosen: dict[tuple[str, str], list[str]] = {}
            sources = table["source"].to_pylist()
            for place in places:
                chosen.setdefault((sources[place], splits[place]), []).append(texts[place])
            for (source, split), some in chosen.items():
                ids, sizes, counts, num_cut = encode(some)
                if (source, split) not in writers:
                    prefix = work.path("tokens", rank, f"{source}_{split}")
                    writer = IndexedWriter(prefix, best_dtype(tokenizer.vocab_size))
                    writers[source, split] = stack.enter_context(writer)
                writers[source, split].add_documents(ids, sizes, counts)
                if unknown := tokenizer.count_unknown(ids):
                    cut["unknown_tokens"] += unknown
                if num_cut is not None:
                    cut["sentences_cut"] += num_cut
            meter.add(len(texts), sum(map(len, texts)))
    save_table(work.shard_file("overlap", rank, "parquet"), pa.concat_tables(contaminated))
    if seen is not None:
        save_array(work.shard_file("overlap", rank, "seen.npy"), seen)
    return {**cut, "contaminated": num_bad}


def _find_evaluation_text(
    work: WorkFolder, table: pa.Table, texts: list[str], splits: list[str], index: EvaluationIndex, seen: np.ndarray
) -> tuple[set[int], pa.Table]:
    """Return the places in the batch of the documents that contain items, and which, as CONTAMINATED.

    Marks the n-grams of training text in `seen`.
    """
    values, offsets = word_ngrams(texts, index.n)
    documents, items, shares = index.contaminates(values, offsets, work.config.overlap.share)
    is_trained = np.array([split == "train" for split in splits])
    is_trained[documents] = False
    index.mark_seen(values[np.repeat(is_trained, np.diff(offsets))], seen)
    columns = {name: table[name].take(pa.array(documents)) for name in PLACE}
    columns["item"] = [index.names[item] for item in items]
    columns["share"] = shares
    return set(documents.tolist()), pa.table(columns, schema=CONTAMINATED)
