"""Tokenize a corpus into token files in the cache, once per corpus and tokenizer."""

import hashlib
import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers

from ..config.data import DataConfig, TokenizerConfig
from ..config.family import CorpusForm, family_of
from .indexed_corpus import open_indexed, special_ids_of
from .indexed_dataset import IndexedDataset
from .indexed_writer import IndexedWriter, best_dtype
from .prepared import INDEX_FOLDER, CorpusPart, PreparedCorpus, cache_error, check_vocabulary
from .sentences import SentenceEncoder, encode_arrays
from .sources import Corpus, Documents, open_corpus
from .tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

FORMAT_VERSION = 3
UNIGRAM_TOKENS = 1 << 26  # read per dataset, at most: enough for a unigram model, and takes about a second
MANY_EPOCHS = 100  # the paper's GPT reads its corpus about 4 times (Table 2), BERT, at as many tokens a step, 30
_BATCH = 1000  # documents tokenized at once


def prepare_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, architecture: str, model_vocab_size: int | None
) -> PreparedCorpus:
    """Read, split, tokenize and write a corpus, or find it in the cache; existing token files are opened in place.

    The cached corpus has the format of `IndexedDataset`: <split>_text_document.bin and .idx for GPT, where a sequence
    is a document followed by end-of-text, or <split>_text_sentence for BERT, with tokenizer.json and manifest.json.
    Several processes may prepare it at once: each builds it in its own folder, and the first to finish renames that
    folder. The cache is keyed by the content of the sources, so a changed file is read again.

    Args:
        architecture: the family, as `model.family`.
        model_vocab_size: vocabulary size of the model; None uses the tokenizer's.

    Raises:
        ValueError: the sources or the tokenizer cannot be used, the corpus is too small to hold out a document, the
            tokenizer has more ids than the model, or the cache cannot be written.
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
    try:
        loaded = load_tokenizer(tokenizer, architecture, model_vocab_size, lambda: documents()[0], source, cache)
        check_vocabulary(loaded, model_vocab_size)
        facts = (FORMAT_VERSION, source, form.name, loaded.fingerprint, tokenizers.__version__)
        folder = cache / "corpora" / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        if not (folder / "manifest.json").is_file():
            _build(folder, documents(), loaded, form, {k: d.notes for k, d in read.items()})
    except OSError as error:  # reading the sources raises ValueErrors
        raise cache_error(cache, error) from None
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    skipped = [found.skipped for found in (corpus, held_out) if found is not None and found.skipped]
    manifest["notes"] = [*skipped, *_notes(data, tokenizer, loaded.vocab_size, manifest)]
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
    """Yield a line for what was wrong in the files, and for each request for which the corpus was too small."""
    for split, notes in manifest["sources"].items():
        problems = [f"{kind.replace('_', ' ')} {number:,}" for kind, number in notes.get("problems", {}).items()]
        if problems:
            yield f"files of the {split} text: {', '.join(problems)}"
    if tokenizer.kind == "trained" and vocab_size < (tokenizer.vocab_size or 0):
        yield (
            f"`tokenizer.vocab_size` is {tokenizer.vocab_size:,}, but the corpus has only {vocab_size:,} "
            "different pieces, which the tokenizer has"
        )
    num_documents = manifest["train"]["documents"] + manifest["validation"]["documents"]
    if data.validation_path is None and data.validation_every > num_documents:
        yield (
            f"`data.validation_every` is {data.validation_every:,}, but the corpus has {num_documents:,} documents: "
            "the last one is held out"
        )


def cache_folder(cache_dir: str | None, key: str = "data.cache_dir") -> Path:
    """Return the folder of prepared data, created if missing.

    It is the value of `key`, or $LMSCALE_CACHE, or ~/.cache/lmscale, in this order.

    Raises:
        ValueError: it cannot be created.
    """
    folder = Path(cache_dir or os.environ.get("LMSCALE_CACHE") or Path.home() / ".cache" / "lmscale").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{key}` must be a folder that exists or can be created, but {folder}: {error.strerror}"
        ) from None
    return folder


def unigram_cross_entropy(train_ids: np.ndarray, validation_ids: np.ndarray, vocab_size: int) -> float:
    """Compute the cross-entropy of the training unigram model on validation tokens, in nats per token: a baseline.

    Counts are smoothed by adding one, so the cost of an id that is absent from the training part is finite.

    Shapes:
        train_ids, validation_ids integers [any length]; returns a float.
    """
    counts = np.bincount(train_ids, minlength=vocab_size) + 1.0
    log_probability = np.log(counts / counts.sum())
    return float(-log_probability[validation_ids].mean())


def corpus_unigram_cross_entropy(prepared: PreparedCorpus) -> float:
    """Compute `unigram_cross_entropy` of a prepared corpus; for blended datasets, the mean by validation weight.

    The first `UNIGRAM_TOKENS` tokens of each validation dataset are compared with those of all training datasets.
    BERT's masked tokens are close to a uniform sample of the tokens, so the value is a baseline for BERT as well.
    """
    train = np.concatenate([_first_tokens(part) for part in prepared.parts["train"]])
    held_out = prepared.parts["validation"]
    values = [unigram_cross_entropy(train, _first_tokens(part), prepared.vocab_size) for part in held_out]
    return float(np.average(values, weights=[part.weight for part in held_out]))


def warn_of_repetition(prepared: PreparedCorpus, num_tokens: int) -> str:
    """Return a line if so many tokens are more than `MANY_EPOCHS` times those of the training part; otherwise empty.

    All datasets of a blend are counted alike, whatever their weight.
    """
    there = 0
    for part in prepared.parts["train"]:
        start, end = IndexedDataset(part.prefix).document_starts(np.array([part.first, part.last])).tolist()
        there += end - start
    if num_tokens <= MANY_EPOCHS * there:
        return ""
    return (
        f"WARNING: the run reads {num_tokens:,} tokens, {num_tokens / there:,.0f} times the {there:,} of its corpus; "
        "train on a larger one (data=local, huggingface or indexed)\n"
    )


def _first_tokens(part: CorpusPart) -> np.ndarray:
    dataset = IndexedDataset(part.prefix)
    start, end = dataset.document_starts(np.array([part.first, part.last])).tolist()
    return dataset.tokens[start : min(end, start + UNIGRAM_TOKENS)]


def _source_key(data: DataConfig, corpus: Corpus, held_out: Corpus | None) -> str:
    facts = (data.kind, data.text_field, data.undecodable, corpus.fingerprint)
    facts += (held_out.fingerprint,) if held_out is not None else (data.validation_every,)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _split(read: dict[str, Documents], every: int) -> tuple[list[str], list[str]]:
    """Return training and validation documents; every `every`-th is held out unless a validation corpus is given."""
    texts = read["train"].texts
    if "validation" in read:
        return texts, read["validation"].texts
    if len(texts) < 2:
        raise ValueError(
            f"a corpus without `data.validation_path` must have at least 2 documents, but has {len(texts)}: "
            "none could be held out"
        )
    every = min(every, len(texts))  # a short corpus holds out its last document, which `_notes` reports
    held_out = set(range(every - 1, len(texts), every))
    return [t for i, t in enumerate(texts) if i not in held_out], [t for i, t in enumerate(texts) if i in held_out]


def _build(
    folder: Path, parts: tuple[list[str], list[str]], tokenizer: Tokenizer, form: CorpusForm, notes: dict
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.parent / f".building_{uuid.uuid4().hex}"
    building.mkdir()  # not by mkdtemp, whose folders no other user may read
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
        # `inner.save` writes the same and raises no OSError.
        (building / "tokenizer.json").write_text(tokenizer.inner.to_str(pretty=True), encoding="utf-8")
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
        for ids in encode_arrays(tokenizer, texts[start : start + _BATCH]):
            writer.add_document([np.append(ids, np.int32(end))])
    return {}


def _write_sentences(writer: IndexedWriter, texts: list[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Write documents as sentences; returns counts of truncated sentences and of documents without a pair."""
    encoder, num_cut, num_without_pair = SentenceEncoder(tokenizer), 0, 0
    for start in range(0, len(texts), _BATCH):
        ids, sizes, counts, cut = encoder.encode(texts[start : start + _BATCH])
        writer.add_documents(ids, sizes, counts)
        num_cut += cut
        num_without_pair += int((counts < 2).sum())
    return {"sentences_cut": num_cut, "documents_without_pair": num_without_pair}


_WRITERS = {"document": _write_documents, "sentence": _write_sentences}
