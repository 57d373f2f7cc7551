"""From documents to token files in the cache, once for each corpus and tokenizer."""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from ..data_config import DataConfig, TokenizerConfig
from .sentences import split_sentences
from .sources import Corpus, Documents, open_corpus
from .tokenizer import BERT_SPECIALS, END_OF_TEXT, Tokenizer, load_tokenizer

FORMAT_VERSION = 2
# A longer "sentence" (a table, a listing) is cut: one piece may not fill a training sample.
MAX_SENTENCE_TOKENS = 128


@dataclass(frozen=True)
class PreparedCorpus:
    """Token files of one corpus and what is known of them; small and picklable.

    Files in `folder`, for split in train, validation:
        <split>_tokens.npy      int32 [tokens], documents back to back; GPT: each ends with end-of-text
        <split>_documents.npy   int64 [documents + 1], where documents start: in tokens (GPT) or in sentences (BERT)
        <split>_sentences.npy   int64 [sentences + 1], where sentences start, in tokens (BERT only)
        tokenizer.json, manifest.json

    Args:
        special_ids: id by token: END_OF_TEXT for GPT, the five of BERT.
        manifest: sha256 and counts of both parts, source notes, versions; as `notes`, which are not in the file, lines
            for the user on what differs from what was asked.
    """

    folder: str
    architecture: str
    vocab_size: int
    special_ids: dict[str, int]
    manifest: dict

    def array(self, split: str, name: str) -> np.ndarray:
        """One of the files above, memory-mapped: `array("train", "tokens")`."""
        return np.load(Path(self.folder) / f"{split}_{name}.npy", mmap_mode="r")

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        inner = tokenizers.Tokenizer.from_file(str(Path(self.folder) / "tokenizer.json"))
        inner.encode_special_tokens = True
        return Tokenizer(inner)


def prepare_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, architecture: str, model_vocab_size: int | None
) -> PreparedCorpus:
    """Read, split, tokenize and write a corpus, or find it in the cache.

    Several processes may do so at once: each builds in a folder of its own, and the first to finish renames it into
    place. The cache is keyed by the content of the sources, so a changed file is read again.

    Args:
        architecture: `gpt` or `bert`.
        model_vocab_size: ids the model has; None takes as many as the tokenizer's.

    Raises:
        ValueError: anything wrong with the sources or the tokenizer, a corpus too small to hold something out, or a
            tokenizer with more ids than the model.
    """
    cache = cache_folder(data.cache_dir)
    corpus = open_corpus(data)
    held_out = open_corpus(data, "validation_path") if data.validation_path is not None else None
    read: dict[str, Documents] = {}

    def documents() -> tuple[list[str], list[str]]:
        if not read:
            read["train"] = corpus.read()
            if held_out is not None:
                read["validation"] = held_out.read()
        return _split(read, data.validation_every)

    source = _source_key(data, corpus, held_out)
    loaded = load_tokenizer(tokenizer, architecture, model_vocab_size, lambda: documents()[0], source, cache)
    if model_vocab_size is not None and loaded.vocab_size > model_vocab_size:
        raise ValueError(
            f"`model.vocab_size` must be at least the tokenizer's {loaded.vocab_size} ids, but is {model_vocab_size}"
        )
    facts = (FORMAT_VERSION, source, architecture, loaded.fingerprint, tokenizers.__version__)
    folder = cache / "corpora" / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    if not (folder / "manifest.json").is_file():
        _build(folder, documents(), loaded, architecture, {k: d.notes for k, d in read.items()})
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    specials = (END_OF_TEXT,) if architecture == "gpt" else BERT_SPECIALS
    special_ids = {token: loaded.id_of(token) for token in specials}
    manifest["notes"] = list(_notes(data, tokenizer, loaded.vocab_size, manifest))
    return PreparedCorpus(str(folder), architecture, loaded.vocab_size, special_ids, manifest)


def _notes(data: DataConfig, tokenizer: TokenizerConfig, vocab_size: int, manifest: dict) -> Iterator[str]:
    """Where the corpus was too small for what was asked, a line with both numbers."""
    if tokenizer.kind == "trained" and vocab_size < (tokenizer.vocab_size or 0):
        yield (
            f"`tokenizer.vocab_size` is {tokenizer.vocab_size:,}, but the corpus has no more than {vocab_size:,} "
            "different pieces: the tokenizer has those"
        )
    num_documents = manifest["train"]["documents"] + manifest["validation"]["documents"]
    if data.validation_path is None and data.validation_every > num_documents:
        yield (
            f"`data.validation_every` is {data.validation_every:,}, but the corpus has {num_documents:,} documents: "
            "the last one is held out"
        )


def cache_folder(cache_dir: str | None) -> Path:
    """Where prepared data is kept: `data.cache_dir`, else $LMSCALE_CACHE, else ~/.cache/lmscale; made if missing.

    Raises:
        ValueError: it cannot be made.
    """
    folder = Path(cache_dir or os.environ.get("LMSCALE_CACHE") or Path.home() / ".cache" / "lmscale").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`data.cache_dir` must be a folder or one that can be made, but {folder}: {error.strerror}"
        ) from None
    return folder


def unigram_cross_entropy(train_ids: np.ndarray, validation_ids: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of the training unigram on validation tokens, in nats a token; the yardstick of a first model.

    One is added to every count, so that an id the training part lacks costs a finite amount.

    Shapes:
        train_ids, validation_ids integers [any length]; returns a float.
    """
    counts = np.bincount(train_ids, minlength=vocab_size) + 1.0
    log_probability = np.log(counts / counts.sum())
    return float(-log_probability[validation_ids].mean())


def corpus_unigram_cross_entropy(prepared: PreparedCorpus) -> float:
    """`unigram_cross_entropy` of a prepared corpus over all its validation tokens.

    BERT's masked tokens are close to a uniform sample of them, so the value serves as its yardstick too.
    """
    return unigram_cross_entropy(
        prepared.array("train", "tokens"), prepared.array("validation", "tokens"), prepared.vocab_size
    )


def _source_key(data: DataConfig, corpus: Corpus, held_out: Corpus | None) -> str:
    facts = (data.kind, data.text_field, data.undecodable, corpus.fingerprint)
    facts += (held_out.fingerprint,) if held_out is not None else (data.validation_every,)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _split(read: dict[str, Documents], every: int) -> tuple[list[str], list[str]]:
    """Training and validation documents; every `every`-th is held out unless a validation corpus was given."""
    texts = read["train"].texts
    if "validation" in read:
        return texts, read["validation"].texts
    if len(texts) < 2:
        raise ValueError(
            f"a corpus without `data.validation_path` must have at least 2 documents, but has {len(texts)}: "
            "nothing could be held out"
        )
    every = min(every, len(texts))  # a short corpus holds out its last document; `_notes` says so
    held_out = set(range(every - 1, len(texts), every))
    return [t for i, t in enumerate(texts) if i not in held_out], [t for i, t in enumerate(texts) if i in held_out]


def _build(
    folder: Path, parts: tuple[list[str], list[str]], tokenizer: Tokenizer, architecture: str, notes: dict
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building_", dir=folder.parent))
    try:
        manifest = {
            "format_version": FORMAT_VERSION,
            "architecture": architecture,
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "sources": notes,
            "versions": {
                "python": platform.python_version(),
                "tokenizers": tokenizers.__version__,
                "numpy": np.__version__,
            },
        }
        for split, texts in zip(("train", "validation"), parts, strict=True):
            arrays, counts = (_encode_gpt if architecture == "gpt" else _encode_bert)(texts, tokenizer)
            for name, array in arrays.items():
                np.save(building / f"{split}_{name}.npy", array)
            manifest[split] = {
                "documents": len(texts),
                "bytes": sum(len(text.encode("utf-8", "replace")) for text in texts),
                "tokens": len(arrays["tokens"]),
                "sha256": hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest(),
            } | counts
        tokenizer.inner.save(str(building / "tokenizer.json"))
        (building / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            os.rename(building, folder)
        except OSError:  # another process was first; its files are the same
            if not (folder / "manifest.json").is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _encode_gpt(texts: list[str], tokenizer: Tokenizer) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    end = tokenizer.id_of(END_OF_TEXT)
    encoded = [[*ids, end] for ids in tokenizer.encode_batch(texts)]
    return {"tokens": _concatenate(encoded), "documents": _starts(encoded)}, {}


def _encode_bert(texts: list[str], tokenizer: Tokenizer) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays, and counts of what sentence pairs cannot use whole."""
    sentences, per_document, num_cut = [], [], 0
    for text in texts:
        pieces = []
        for ids in tokenizer.encode_batch(split_sentences(text)):
            pieces += [ids[i : i + MAX_SENTENCE_TOKENS] for i in range(0, len(ids), MAX_SENTENCE_TOKENS)]
            num_cut += len(ids) > MAX_SENTENCE_TOKENS
        sentences += pieces
        per_document.append(pieces)
    arrays = {
        "tokens": _concatenate(sentences),
        "sentences": _starts(sentences),
        "documents": _starts(per_document),
    }
    num_without_pair = sum(len(pieces) < 2 for pieces in per_document)
    return arrays, {"sentences_cut": num_cut, "documents_without_pair": num_without_pair}


def _concatenate(lists: list[list[int]]) -> np.ndarray:
    return np.fromiter((i for ids in lists for i in ids), dtype=np.int32, count=sum(map(len, lists)))


def _starts(lists: list[list]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(ids) for ids in lists], dtype=np.int64)]).astype(np.int64)
