"""The prepared corpus of a run: tokenized into token files in the cache, once per corpus and tokenizer."""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from ..config.checks import expand_home, refuse
from ..config.data import DataConfig, TokenizerConfig
from ..config.family import CorpusForm, family_of, load
from ..shared_files import build_folder
from ..text.input_files import list_files
from .indexed_corpus import TOKENIZER, IndexedCorpus
from .indexed_dataset import CorpusPart, IndexedDataset
from .indexed_writer import IndexedWriter, best_dtype
from .sentences import document_encoder
from .sources import Documents, open_corpus
from .tokenizer import UNKNOWN, Tokenizer, load_tokenizer, read_tokenizer

FORMAT_VERSION = 8  # incremented when the same files give other tokens or notes, to read cached ones again
UNIGRAM_TOKENS = 1 << 26  # read per dataset, at most: enough for a unigram model, and takes about a second
MANY_EPOCHS = 100  # the paper's GPT reads its corpus about 4 times (Table 2), BERT, at as many tokens a step, 30
_FEWER_UNKNOWN = {  # by `note_unknown`'s kind
    "trained": "a larger tokenizer.vocab_size holds more letters",
    None: "take a model pretrained on such texts",
}
_BATCH = 1000  # documents tokenized at once


@dataclass(frozen=True)
class PreparedCorpus:
    """Indexed datasets of one corpus and what is known of them; small and picklable.

    Args:
        folder: contains tokenizer.json, the tokenizer of the tokens.
        make_samples: builds the family's samples, see `Family.samples`.
        special_ids: id by token, of the family's `special_tokens`.
        manifest: `sha256` and counts of both splits, source notes, versions. `notes`, which are not in the file, are
            lines for the user on differences from the request.
        parts: the datasets to blend, by split (train, validation).
        index_folder: folder of the sample indices.
        shuffles_documents: whether GPT's training documents are shuffled before they are concatenated; a small corpus
            is read in order.
    """

    folder: str
    make_samples: Callable
    vocab_size: int
    special_ids: dict[str, int]
    manifest: dict
    parts: dict[str, tuple[CorpusPart, ...]]
    index_folder: str
    shuffles_documents: bool = False

    @property
    def content_hash(self) -> str:
        """Hash of the tokenized training text."""
        identity = self.manifest["train"]["sha256"] + self.manifest["tokenizer"]
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the tokens."""
        return read_tokenizer(Path(self.folder) / "tokenizer.json")


def prepare_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, family: str, model_vocab_size: int | None
) -> PreparedCorpus:
    """Read, split, tokenize and write a corpus, or find it in the cache; existing token files are opened in place.

    The cached corpus has the format of `IndexedDataset`: <split>_text_document.bin and .idx for GPT, where a sequence
    is a document followed by end-of-text, or <split>_text_sentence for BERT, with tokenizer.json and manifest.json.
    Several processes may prepare it at once: each builds it in its own folder, and the first to finish renames that
    folder. The cache is keyed by the content of the sources, so a changed file is read again.

    Args:
        family: as `model.family`.
        model_vocab_size: vocabulary size of the model; None uses the tokenizer's.

    Raises:
        ValueError: the sources or the tokenizer cannot be used, the corpus is too small to hold out a document, the
            tokenizer has more ids than the model, or the cache cannot be written.
    """
    cache, traits = cache_folder(data.cache_dir), family_of(family)
    corpus = (IndexedCorpus if data.kind == "indexed" else TextCorpus)(data, traits.corpus)
    try:
        loaded = corpus.load_tokenizer(tokenizer, model_vocab_size, cache)
        if model_vocab_size is not None and loaded.vocab_size > model_vocab_size:
            refuse("model.vocab_size", f"at least the tokenizer's {loaded.vocab_size} ids", model_vocab_size)
        folder, manifest, parts = corpus.open(loaded, cache)
    except OSError as error:  # reading the sources raises ValueErrors
        raise ValueError(
            "`data.cache_dir` must be a folder that can be written and has free space, but "
            f"{error.filename or cache}: {error.strerror}"
        ) from None
    return PreparedCorpus(
        str(folder),
        load(traits.samples),
        loaded.vocab_size,
        {token: loaded.id_of(token) for token in traits.corpus.special_tokens},
        manifest,
        parts,
        str(cache / "indices"),
        corpus.shuffles_documents,
    )


def check_corpus(data: DataConfig, family: str) -> None:
    """Check that the files of a corpus exist, without reading them.

    Raises:
        ValueError: a path is missing or has no file of a known suffix, or token files are for another family.
    """
    for key in ("path", "validation_path"):
        if data.kind == "local" and getattr(data, key) is not None:
            list_files(Path(getattr(data, key)), f"data.{key}")
    if data.kind == "indexed":
        IndexedCorpus(data, family_of(family).corpus)


class TextCorpus:
    """A corpus of texts, whose token files are found in the cache or written into it; see `prepare_corpus`.

    Raises:
        ValueError: the sources cannot be opened.
    """

    shuffles_documents = False

    def __init__(self, data: DataConfig, form: CorpusForm) -> None:
        self.data, self.form, self.sources = data, form, {"train": open_corpus(data)}
        if data.validation_path is not None:
            self.sources["validation"] = open_corpus(data, "validation_path")
        facts = (data.kind, data.text_field, data.undecodable, *(held.fingerprint for held in self.sources.values()))
        facts += (data.validation_every,) if data.validation_path is None else ()
        self.key = hashlib.sha256(repr(facts).encode()).hexdigest()

    def load_tokenizer(self, config: TokenizerConfig, model_vocab_size: int | None, cache: Path) -> Tokenizer:
        """Load the tokenizer, or train it on the training documents."""
        self.tokenizer_kind = config.kind
        self.requested_size = config.vocab_size if config.kind == "trained" else None
        return load_tokenizer(config, self.form, model_vocab_size, lambda: self.split["train"], self.key, cache)

    def open(self, tokenizer: Tokenizer, cache: Path) -> tuple[Path, dict, dict[str, tuple[CorpusPart, ...]]]:
        """Return the folder in the cache, the manifest and the parts by split, for `PreparedCorpus`.

        Raises:
            ValueError: the folder is damaged.
        """
        facts = (FORMAT_VERSION, self.key, self.form.name, tokenizer.file_hash, tokenizers.__version__)
        folder = cache / "corpora" / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        if not folder.is_dir():
            self._build(folder, tokenizer)
        try:
            manifest, parts = self._read(folder, tokenizer)
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{folder} is damaged; remove it to have it built again") from None
        return folder, manifest, parts

    def _read(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict, dict[str, tuple[CorpusPart, ...]]]:
        """Return the manifest and the parts of a corpus in the cache, whose tokenizer a run copies."""
        if (folder / TOKENIZER).read_text(encoding="utf-8") != tokenizer.inner.to_str(pretty=True):
            raise ValueError(TOKENIZER)
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["notes"] = self._notes(tokenizer.vocab_size, manifest)
        parts = {}
        for split in ("train", "validation"):
            held, prefix = manifest[split], folder / f"{split}_text_{self.form.sequence}"
            identity = f"{held['sha256']} {manifest['tokenizer']}"
            parts[split] = (CorpusPart(str(prefix), 0, held["documents"], identity),)
        return manifest, parts

    @cached_property
    def documents(self) -> dict[str, Documents]:
        """The documents of each source, which are read only if something is not in the cache."""
        return {split: held.read() for split, held in self.sources.items()}

    @cached_property
    def split(self) -> dict[str, list[str]]:
        """Texts by split; every `data.validation_every`-th is held out unless a validation corpus is given.

        Raises:
            ValueError: there is only one document.
        """
        texts = {split: held for split, (held, _) in self.documents.items()}
        if "validation" in texts:
            return texts
        whole = texts["train"]
        if len(whole) < 2:
            raise ValueError(
                f"a corpus without `data.validation_path` must have at least 2 documents, but has {len(whole)}: "
                "none could be held out; a document of a text file ends at a blank line, and data.validation_path=FILE "
                "holds out another text"
            )
        every = min(self.data.validation_every, len(whole))  # else the last one, as `_notes` reports
        return {
            "train": [text for number, text in enumerate(whole, start=1) if number % every],
            "validation": whole[every - 1 :: every],
        }

    def _notes(self, vocab_size: int, manifest: dict) -> list[str]:
        """Return a line for what was wrong in the files, and for each request for which the corpus was too small."""
        notes = [held.skipped for held in self.sources.values() if held.skipped]
        for split, facts in manifest["sources"].items():
            problems = [f"{kind.replace('_', ' ')} {number:,}" for kind, number in facts.get("problems", {}).items()]
            if problems:
                notes.append(f"files of the {split} text: {', '.join(problems)}")
        notes += note_missing_pieces(self.requested_size, vocab_size)
        splits = manifest["train"], manifest["validation"]
        counts = (sum(held[kind] for held in splits) for kind in ("unknown_tokens", "tokens"))
        notes += note_unknown(*counts, self.tokenizer_kind)
        share = manifest["validation"]["copied_bytes"] / max(1, manifest["validation"]["bytes"])
        if share > 0.01:  # headings that recur stay below
            notes.append(
                f"{share:.0%} of the held-out text is in documents that are also in the training text, which lowers "
                "the validation loss; prepare_data.py removes copies"
            )
        every, there = self.data.validation_every, manifest["train"]["documents"] + manifest["validation"]["documents"]
        if "validation" not in self.sources and every > there:
            notes.append(
                f"`data.validation_every` is {every:,}, but the corpus has {there:,} documents: "
                "the last one is held out"
            )
        return notes

    def _build(self, folder: Path, tokenizer: Tokenizer) -> None:
        with build_folder(folder) as building:
            manifest = {
                "format_version": FORMAT_VERSION,
                "architecture": self.form.name,
                "tokenizer": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "sources": {split: notes for split, (_, notes) in self.documents.items()},
                "versions": {
                    "python": platform.python_version(),
                    "tokenizers": tokenizers.__version__,
                    "numpy": np.__version__,
                },
            }
            for split, texts in self.split.items():
                manifest[split] = self._write(building / f"{split}_text_{self.form.sequence}", texts, tokenizer)
            known = set(self.split["train"])
            copies = (len(text.encode("utf-8", "replace")) for text in self.split["validation"] if text in known)
            manifest["validation"]["copied_bytes"] = sum(copies)
            # `inner.save` writes the same and raises no OSError.
            (building / TOKENIZER).write_text(tokenizer.inner.to_str(pretty=True), encoding="utf-8")
            (building / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def _write(self, prefix: Path, texts: list[str], tokenizer: Tokenizer) -> dict:
        """Write the token file of a split; returns its entry of the manifest."""
        encode, num_cut, num_without_pair = document_encoder(tokenizer, self.form.sequence), 0, 0
        num_unknown = 0
        with IndexedWriter(prefix, best_dtype(tokenizer.vocab_size)) as writer:
            for start in range(0, len(texts), _BATCH):
                ids, sizes, counts, cut = encode(texts[start : start + _BATCH])
                writer.add_documents(ids, sizes, counts)
                num_unknown += tokenizer.count_unknown(ids)
                num_cut += cut or 0
                num_without_pair += int((counts < 2).sum())
        entry = {
            "documents": len(texts),
            "bytes": sum(len(text.encode("utf-8", "replace")) for text in texts),
            "tokens": sum(writer.sizes),
            "unknown_tokens": num_unknown,
            "sha256": hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest(),
        }
        if self.form.sequence == "sentence":
            entry |= {"sentences_cut": num_cut, "documents_without_pair": num_without_pair}
        return entry


def note_missing_pieces(requested_size: int | None, vocab_size: int) -> list[str]:
    """Return a line if a tokenizer was trained on a corpus that is too small for its requested size."""
    found = f"the corpus has only {vocab_size:,} different pieces, which the tokenizer has"
    return [f"`tokenizer.vocab_size` is {requested_size:,}, but {found}"] if vocab_size < (requested_size or 0) else []


def note_unknown(num_unknown: int, num_tokens: int, kind: str | None) -> list[str]:
    """Return a line if more than one token in a thousand is [UNK].

    Args:
        kind: that of `TokenizerConfig`; None: the tokenizer is that of a trained model.
    """
    if num_unknown * 1000 <= num_tokens:
        return []
    return [
        f"{num_unknown / num_tokens:.1%} of the tokens are {UNKNOWN}, from letters that the tokenizer lacks or words "
        f"of over 100 letters; {_FEWER_UNKNOWN.get(kind, 'tokenizer=trained fits one to this text')}"
    ]


def cache_folder(cache_dir: str | None, key: str = "data.cache_dir") -> Path:
    """Return the folder of prepared data, created if missing.

    It is the value of `key`, or $LMSCALE_CACHE, or ~/.cache/lmscale, in this order.

    Raises:
        ValueError: it cannot be created.
    """
    chosen = cache_dir or os.environ.get("LMSCALE_CACHE") or "~/.cache/lmscale"
    folder = Path(expand_home(chosen, key if cache_dir else "LMSCALE_CACHE")).absolute()
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


def describe_repetition(prepared: PreparedCorpus, num_tokens: int) -> str:
    """Say if so many tokens are more than `MANY_EPOCHS` times those of the training part; otherwise empty.

    All datasets of a blend are counted alike, whatever their weight.
    """
    there = sum(end - start for _, start, end in map(_range_of, prepared.parts["train"]))
    if num_tokens <= MANY_EPOCHS * there:
        return ""
    return (
        f"the run reads {num_tokens:,} tokens, {num_tokens / there:,.0f} times the {there:,} of its corpus; "
        "train on a larger one (data=local, huggingface or indexed)"
    )


def _first_tokens(part: CorpusPart) -> np.ndarray:
    dataset, start, end = _range_of(part)
    return dataset.tokens[start : min(end, start + UNIGRAM_TOKENS)]


def _range_of(part: CorpusPart) -> tuple[IndexedDataset, int, int]:
    """Return the dataset of a part, and its first token and the one after its last."""
    dataset = IndexedDataset(part.prefix)
    return dataset, *dataset.document_starts(np.array([part.first, part.last])).tolist()
