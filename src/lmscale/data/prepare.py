"""From documents to token files in the cache, once for each corpus and tokenizer."""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers

from ..config.data import DataConfig, TokenizerConfig
from ..config.family import CorpusForm, family_of
from .indexed import IndexedWriter, best_dtype
from .indexed_corpus import INDEX_FOLDER, check_vocabulary, open_indexed, special_ids_of
from .indexed_dataset import IndexedDataset
from .prepared import CorpusPart, PreparedCorpus
from .sentences import SentenceEncoder
from .sources import Corpus, Documents, open_corpus
from .tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

FORMAT_VERSION = 3
YARDSTICK_TOKENS = 1 << 26  # of each dataset, at most: enough for a unigram, and a second's work
_BATCH = 1000  # documents tokenized together


def prepare_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, architecture: str, model_vocab_size: int | None
) -> PreparedCorpus:
    """Read, split, tokenize and write a corpus, or find it in the cache; binary datasets are used where they are.

    In the cache a corpus has the form of `IndexedDataset`: <split>_text_document.bin and .idx for GPT, a sequence a
    document that ends with end-of-text, or <split>_text_sentence for BERT, beside tokenizer.json and manifest.json.
    Several processes may do so at once: each builds in a folder of its own, and the first to finish renames it into
    place. The cache is keyed by the content of the sources, so a changed file is read again.

    Args:
        architecture: the family, as `model.family`.
        model_vocab_size: ids the model has; None takes as many as the tokenizer's.

    Raises:
        ValueError: anything wrong with the sources or the tokenizer, a corpus too small to hold something out, or a
            tokenizer with more ids than the model.
    """
    cache, form = cache_folder(data.cache_dir), family_of(architecture).corpus
    if data.kind == "indexed":
        return open_indexed(data, tokenizer, architecture, model_vocab_size, cache)
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
    check_vocabulary(loaded, model_vocab_size)
    facts = (FORMAT_VERSION, source, form.name, loaded.fingerprint, tokenizers.__version__)
    folder = cache / "corpora" / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    if not (folder / "manifest.json").is_file():
        _build(folder, documents(), loaded, form, {k: d.notes for k, d in read.items()})
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["notes"] = list(_notes(data, tokenizer, loaded.vocab_size, manifest))
    parts = {}
    for split in ("train", "validation"):
        held = manifest[split]
        prefix = str(folder / f"{split}_text_{form.sequence}")
        parts[split] = (CorpusPart(prefix, 0, held["documents"], f"{held['sha256']} {manifest['tokenizer']}"),)
    return PreparedCorpus(
        str(folder),
        architecture,
        loaded.vocab_size,
        special_ids_of(loaded, form),
        manifest,
        parts,
        str(cache / INDEX_FOLDER),
    )


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
    """`unigram_cross_entropy` of a prepared corpus, of blended datasets the mean by their weights in validation.

    Each looks at its first `YARDSTICK_TOKENS` tokens, against those of the training datasets together. BERT's masked
    tokens are close to a uniform sample of them, so the value serves as its yardstick too.
    """
    train = np.concatenate([_first_tokens(part) for part in prepared.parts["train"]])
    held_out = prepared.parts["validation"]
    values = [unigram_cross_entropy(train, _first_tokens(part), prepared.vocab_size) for part in held_out]
    return float(np.average(values, weights=[part.weight for part in held_out]))


def _first_tokens(part: CorpusPart) -> np.ndarray:
    dataset = IndexedDataset(part.prefix)
    start, end = dataset.document_starts(np.array([part.first, part.last])).tolist()
    return dataset.tokens[start : min(end, start + YARDSTICK_TOKENS)]


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
    folder: Path, parts: tuple[list[str], list[str]], tokenizer: Tokenizer, form: CorpusForm, notes: dict
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building_", dir=folder.parent))
    try:
        manifest = {
            "format_version": FORMAT_VERSION,
            "architecture": form.name,
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
            writer = IndexedWriter(building / f"{split}_text_{form.sequence}", best_dtype(tokenizer.vocab_size))
            counts = _WRITERS[form.sequence](writer, texts, tokenizer)
            writer.finish()
            manifest[split] = {
                "documents": len(texts),
                "bytes": sum(len(text.encode("utf-8", "replace")) for text in texts),
                "tokens": sum(writer.sizes),
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


def _write_documents(writer: IndexedWriter, texts: list[str], tokenizer: Tokenizer) -> dict[str, int]:
    end = tokenizer.id_of(END_OF_TEXT)
    for start in range(0, len(texts), _BATCH):
        for ids in tokenizer.encode_batch(texts[start : start + _BATCH]):
            writer.add_document([[*ids, end]])
    return {}


def _write_sentences(writer: IndexedWriter, texts: list[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Returns counts of what sentence pairs cannot use whole."""
    encoder, num_cut, num_without_pair = SentenceEncoder(tokenizer), 0, 0
    for start in range(0, len(texts), _BATCH):
        ids, sizes, counts, cut = encoder.encode(texts[start : start + _BATCH])
        writer.add_documents(ids, sizes, counts)
        num_cut += cut
        num_without_pair += int((counts < 2).sum())
    return {"sentences_cut": num_cut, "documents_without_pair": num_without_pair}


_WRITERS = {"document": _write_documents, "sentence": _write_sentences}
